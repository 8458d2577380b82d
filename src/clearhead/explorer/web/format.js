// Numbers as text: two decimals where one looks, all of them where one points. Nothing is computed here.

const WORDS = { nan: "NaN", inf: "∞", "-inf": "−∞" };

/** A number that JSON may have as a word: "nan", "inf", "-inf". */
export function value(given) {
  if (typeof given === "number") return given;
  return given === "inf" ? Infinity : given === "-inf" ? -Infinity : NaN;
}

/** Two decimals, as Python writes them: halves go to the even neighbour. */
export function two(given) {
  const x = value(given);
  if (!Number.isFinite(x)) return WORDS[String(given).toLowerCase()] ?? (x > 0 ? "∞" : x < 0 ? "−∞" : "NaN");
  const half = Math.abs(x) * 200;
  if (Number.isInteger(half) && half % 4 === 1 && half < 1e15) return ((Math.sign(x) * (half - 1)) / 200).toFixed(2);
  return (x === 0 ? 0 : x).toFixed(2);
}

/** Every digit that the number has. */
export function full(given) {
  const x = value(given);
  return Number.isFinite(x) ? String(x) : two(given);
}
