// What tests/test_site.py asks of an open page. Evaluated in the browser; returns plain data.
() => {
  const unfold = () => {
    document.querySelectorAll("details").forEach((element) => { element.open = true; });
    document.querySelectorAll(".toggle-hidden").forEach((element) => element.classList.remove("toggle-hidden"));
  };

  const parse = (colour) => {
    const parts = colour.match(/[\d.]+/g).map(Number);
    // Chromium writes color-mix() results as color(srgb r g b / a), with channels from 0 to 1.
    const scale = colour.startsWith("color(") ? 255 : 1;
    return [parts[0] * scale, parts[1] * scale, parts[2] * scale, parts.length > 3 ? parts[3] : 1];
  };

  const over = (top, below) => {
    const alpha = top[3];
    return [0, 1, 2].map((i) => top[i] * alpha + below[i] * (1 - alpha)).concat(1);
  };

  // The colour behind an element: its ancestors' backgrounds, laid over each other down to the page.
  const backdrop = (element) => {
    const layers = [];
    for (let node = element; node; node = node.parentElement) {
      const colour = parse(getComputedStyle(node).backgroundColor);
      layers.push(colour);
      if (colour[3] === 1) break;
    }
    return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255, 1]);
  };

  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };

  const contrast = (a, b) => {
    const [high, low] = [luminance(a), luminance(b)].sort((x, y) => y - x);
    return (high + 0.05) / (low + 0.05);
  };

  const seen = (element) => element.checkVisibility({ opacityProperty: true, visibilityProperty: true });

  const texts = function* (root) {
    const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
      if (node.data.trim() && node.parentElement && seen(node.parentElement)) yield node;
    }
  };

  const faint = () => {
    const found = new Map();
    for (const node of texts(document.body)) {
      const element = node.parentElement;
      if (element.closest("script, style, noscript, mjx-assistive-mml, .headerlink, svg")) continue;
      const box = element.getBoundingClientRect();
      if (box.width < 2 || box.height < 2) continue;
      const style = getComputedStyle(element);
      const behind = backdrop(element);
      const colour = over(parse(style.color), behind);
      const ratio = contrast(colour.slice(0, 3), behind.slice(0, 3));
      const size = parseFloat(style.fontSize);
      const large = size >= 24 || (size >= 18.66 && parseInt(style.fontWeight, 10) >= 700);
      if (ratio < (large ? 3 : 4.5)) {
        found.set(`${style.color} on ${behind.map(Math.round)} (${ratio.toFixed(2)})`, node.data.trim().slice(0, 50));
      }
    }
    return [...found].map(([colours, text]) => `${colours}: ${text}`);
  };

  const rawTex = () => {
    const found = [];
    for (const node of texts(document.querySelector("main") ?? document.body)) {
      if (node.parentElement.closest("code, pre, script, style, mjx-container, kbd")) continue;
      if (/\\[a-zA-Z(\[]|\$[^$\s][^$]*\$/.test(node.data)) found.push(node.data.trim().slice(0, 80));
    }
    return found;
  };

  // Content wider than its box must scroll there, and nowhere may it push the page.
  const wide = () => {
    const limit = document.documentElement.clientWidth;
    const found = [];
    for (const element of document.querySelectorAll("main *")) {
      const box = element.getBoundingClientRect();
      if (box.right <= limit + 1 || !seen(element) || box.width < 2) continue;
      let inside = false;
      for (let node = element.parentElement; node && !inside; node = node.parentElement) {
        inside = ["auto", "scroll", "hidden", "clip"].includes(getComputedStyle(node).overflowX) && node.tagName !== "BODY" && node.tagName !== "HTML";
      }
      if (!inside) found.push(`${element.tagName.toLowerCase()}.${element.className} reaches ${Math.round(box.right)} px`);
    }
    return found;
  };

  const pictures = () => [...document.querySelectorAll("main img")].filter(seen).map((image) => {
    const canvas = document.createElement("canvas");
    canvas.width = canvas.height = 24;
    const pen = canvas.getContext("2d");
    let alpha = -1;
    if (image.complete && image.naturalWidth) {
      pen.drawImage(image, -1, -1, 26, 26);  // a scaled picture's outermost pixels are blended with nothing
      alpha = 255;
      const data = pen.getImageData(0, 0, 24, 24).data;
      for (let i = 3; i < data.length; i += 4) alpha = Math.min(alpha, data[i]);
    }
    return { source: image.getAttribute("src"), alt: image.alt, alpha };
  });

  unfold();
  const main = document.querySelector("main");
  return {
    theme: document.documentElement.dataset.theme,
    faint: faint(),
    rawTex: rawTex(),
    wide: wide(),
    overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    formulas: document.querySelectorAll("main .math").length,
    typeset: document.querySelectorAll("main .math mjx-container").length,
    errors: [...document.querySelectorAll("mjx-merror, [data-mjx-error]")].map((element) => element.textContent),
    pictures: pictures(),
    traceback: /Traceback \(most recent call last\)/.test(main ? main.innerText : ""),
  };
}
