// Pictures much wider than high are put into a box of their own, which a phone scrolls rather than shrinks them.
addEventListener("load", () => {
  for (const image of document.querySelectorAll("div.cell_output img, img.sphx-glr-single-img")) {
    if (image.naturalWidth < 1.8 * image.naturalHeight) continue;
    const box = document.createElement("div");
    const shown = image.closest("a") ?? image;
    box.className = "scrolls";
    shown.replaceWith(box);
    box.append(shown);
    image.classList.add("wide");
  }
});

// Explorers are pages of their own: they are told whether this one is light or dark, when they are there and when it
// changes. What the library shows in a page asks for it by the mark that JupyterLab sets.
const tell = () => {
  const chosen = document.body.dataset.theme;
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const theme = ["light", "dark"].includes(chosen) ? chosen : dark ? "dark" : "light";
  document.body.dataset.jpThemeLight = theme === "light";
  for (const frame of document.querySelectorAll("iframe.explorer")) frame.contentWindow?.postMessage({ theme }, "*");
};
for (const frame of document.querySelectorAll("iframe.explorer")) frame.addEventListener("load", tell);
new MutationObserver(tell).observe(document.body, { attributes: true, attributeFilter: ["data-theme"] });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", tell);
tell();
