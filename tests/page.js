// What tests/test_site.py asks of an open page. Evaluated in the browser; returns plain data.
() => {
  const unfold = () => {
    document.querySelectorAll("details").forEach((element) => { element.open = true; });
    document.querySelectorAll(".toggle-hidden").forEach((element) => element.classList.remove("toggle-hidden"));
  };

  // Asked of thousands of elements, answered for the few dozen there are: what is looked up by a key is kept.
  const kept = (answer, store = new Map()) => (key) => {
    if (!store.has(key)) store.set(key, answer(key));
    return store.get(key);
  };

  const parse = kept((colour) => {
    const parts = colour.match(/[\d.]+/g).map(Number);
    // Chromium writes color-mix() results as color(srgb r g b / a), with channels from 0 to 1.
    const scale = colour.startsWith("color(") ? 255 : 1;
    return [parts[0] * scale, parts[1] * scale, parts[2] * scale, parts.length > 3 ? parts[3] : 1];
  });

  const over = (top, below) => {
    const alpha = top[3];
    return [0, 1, 2].map((i) => top[i] * alpha + below[i] * (1 - alpha)).concat(1);
  };

  // The colour behind an element: its ancestors' backgrounds, laid over each other down to the page.
  const backdrop = kept((element) => {
    if (!element) return [255, 255, 255, 1];
    const colour = parse(getComputedStyle(element).backgroundColor);
    return colour[3] === 1 ? colour : over(colour, backdrop(element.parentElement));
  });

  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };

  const contrast = (a, b) => {
    const [high, low] = [luminance(a), luminance(b)].sort((x, y) => y - x);
    return (high + 0.05) / (low + 0.05);
  };

  const ratio = kept((pair) => {
    const [ink, behind] = JSON.parse(pair);
    return contrast(over(parse(ink), behind), behind);
  });

  const seen = (element) => element.checkVisibility({ opacityProperty: true, visibilityProperty: true });

  // Every piece of text that is seen, without the scripts and without the MathML that only screen readers read.
  const collect = () => {
    const found = [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT | NodeFilter.SHOW_ELEMENT, (node) => {
      if (node.nodeType === Node.TEXT_NODE) return NodeFilter.FILTER_ACCEPT;
      return node.matches("script, style, mjx-assistive-mml") ? NodeFilter.FILTER_REJECT : NodeFilter.FILTER_SKIP;
    });
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
      if (node.data.trim() && seen(node.parentElement)) found.push(node);
    }
    return found;
  };

  const faint = (texts) => {
    const found = new Map();
    for (const node of texts) {
      const element = node.parentElement;
      if (element.closest("noscript, .headerlink, svg")) continue;
      const box = element.getBoundingClientRect();
      if (box.width < 2 || box.height < 2) continue;
      const style = getComputedStyle(element);
      const behind = backdrop(element);
      const value = ratio(JSON.stringify([style.color, behind]));
      if (value >= 4.5) continue;
      const size = parseFloat(style.fontSize);
      const large = size >= 24 || (size >= 18.66 && parseInt(style.fontWeight, 10) >= 700);
      if (value < (large ? 3 : 4.5)) {
        found.set(`${style.color} on ${behind.map(Math.round)} (${value.toFixed(2)})`, node.data.trim().slice(0, 50));
      }
    }
    return [...found].map(([colours, text]) => `${colours}: ${text}`);
  };

  const rawTex = (texts) => {
    const root = document.querySelector("main") ?? document.body;
    const found = [];
    for (const node of texts) {
      if (!/\\[a-zA-Z(\[]|\$[^$\s][^$]*\$/.test(node.data) || !root.contains(node)) continue;
      if (node.parentElement.closest("code, pre, script, style, mjx-container, kbd")) continue;
      found.push(node.data.trim().slice(0, 80));
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

  // The width that the lines around a formula have.
  const column = (formula) => {
    let node = formula.parentElement;
    while (getComputedStyle(node).display.startsWith("inline")) node = node.parentElement;
    const style = getComputedStyle(node);
    return node.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
  };

  // Formulas in a line that scroll, and so carry a bar and stop the Tab key, although the line has room for them.
  const scrolling = () => [...document.querySelectorAll("main span.math")]
    .filter((formula) => formula.scrollWidth > formula.clientWidth || formula.offsetHeight > formula.clientHeight)
    .filter((formula) => seen(formula) && formula.querySelector("mjx-math").getBoundingClientRect().width <= column(formula))
    .map((formula) => `${formula.textContent} (${formula.scrollWidth} px in ${formula.clientWidth} px)`);

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
  const texts = collect();
  const main = document.querySelector("main");
  return {
    theme: document.documentElement.dataset.theme,
    faint: faint(texts),
    rawTex: rawTex(texts),
    wide: wide(),
    scrolling: scrolling(),
    overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    formulas: document.querySelectorAll("main .math").length,
    typeset: document.querySelectorAll("main .math mjx-container").length,
    errors: [...document.querySelectorAll("mjx-merror, [data-mjx-error]")].map((element) => element.textContent),
    pictures: pictures(),
    traceback: /Traceback \(most recent call last\)/.test(main ? main.innerText : ""),
  };
}
