// Shades to colours: cividis, which looks the same to people who see red and green alike (Nuñez, Anderton, Renslow 2018).

const TABLE =
  "00224d00234f00235000245200255400265500265700275900285b00285c00295e002a60002a62002b64002c66002c67002d69002e6b002f6d" +
  "002f6f0030700030700031700031700432700833700b33700e347011356f14366f16366f18376f1a386f1c386e1d396e1f3a6e213b6e223b6e" +
  "243c6e253d6d273d6d283e6d2a3f6d2b3f6d2c406d2e416c2f426c30426c31436c32446c34446c35456c36466c37466c38476c39486c3a486b" +
  "3b496b3d4a6b3e4b6b3f4b6b404c6b414d6b424d6b434e6b444f6b454f6b46506b47516b48516b49526b4a536b4b546c4c546c4d556c4e566c" +
  "4e566c4f576c50586c51586c52596c535a6c545a6c555b6d565c6d575d6d585d6d595e6d595f6d5a5f6d5b606e5c616e5d616e5e626e5f636e" +
  "60646e61646f61656f62666f63666f64676f656870666970676970686a70686b71696b716a6c716b6d716c6d726d6e726e6f726e70736f7073" +
  "7071737172737273747373747474757475757575757676767777767878767978777979777a7a777b7b777c7b787d7c787e7d787f7d78807e78" +
  "817f788280788380788481788582788583788683788784788885788986788a86788b87788c88788d89788e89788f8a77908b77918c77928c77" +
  "938d77948e77958f77968f779790769891769992769a93769b93769c94769d95759e96759f9675a09775a19874a29974a39a74a49a74a59b73" +
  "a69c73a79d73a89e73a99e72aa9f72aba072aca171ada271aea271afa370b0a470b1a570b2a66fb3a66fb4a76fb5a86eb6a96eb7aa6db8ab6d" +
  "b9ab6dbaac6cbbad6cbcae6bbdaf6bbeb06abfb06ac1b169c2b269c3b368c4b468c5b567c6b567c7b666c8b765c9b865cab964cbba64ccbb63" +
  "cdbc62cebc62cfbd61d0be60d2bf60d3c05fd4c15ed5c25ed6c35dd7c35cd8c45bd9c55adac65adbc759dcc858dec957dfca56e0cb55e1cc54" +
  "e2cc53e3cd52e4ce51e5cf50e6d04fe8d14ee9d24dead34cebd44becd54aedd648eed747efd846f1d944f2da43f3da42f4db40f5dc3ff6dd3d" +
  "f8de3bf9df3afae038fbe136fde234fde333fde534fde636fde737";

const RGB = new Uint8Array(256 * 3);
for (let i = 0; i < RGB.length; i++) RGB[i] = parseInt(TABLE.slice(2 * i, 2 * i + 2), 16);

/** Shade → pixel, as `ImageData` has them on a machine that stores the lowest byte first; 255 is clear. */
export const PIXELS = new Uint32Array(256);
for (let shade = 0; shade < 255; shade++) {
  const [red, green, blue] = rgb(shade);
  PIXELS[shade] = ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}

/** The red, green and blue of a shade from 0 to 254. */
export function rgb(shade) {
  const at = 3 * (shade > 254 ? 255 : shade);
  return [RGB[at], RGB[at + 1], RGB[at + 2]];
}

/** The same as CSS. */
export function css(shade) {
  return `rgb(${rgb(shade).join(" ")})`;
}

/** Black or white, whichever can be read on a shade. */
export function ink(shade) {
  return shade > 140 ? "#10131a" : "#ffffff";
}
