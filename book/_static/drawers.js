// The list of chapters and the contents of a page. The theme opens, folds and closes both; here their buttons get
// names and tell their state, the focus stays where the reader left it, and a drawer shows a way out.
// Loaded with `defer`: before the theme's own scripts look for these elements.
(() => {
  const COLUMN = window.matchMedia("(min-width: 992px)"); // from here on the theme folds the list, below it is a dialog

  const prepare = (kind, name) => {
    const button = document.querySelector(`.${kind}-toggle`);
    const sidebar = document.getElementById(`pst-${kind}-sidebar`);
    const dialog = document.getElementById(`pst-${kind}-sidebar-modal`);
    if (!button || !sidebar || !dialog) return;

    button.title = name;
    button.setAttribute("aria-label", name);
    dialog.setAttribute("aria-label", name);
    // The theme's tooltip would stay after a touch, and so the theme takes the focus off a pressed button: the next
    // Enter would do nothing, and a closed dialog would give the focus back to no one.
    button.removeAttribute("data-bs-toggle");
    button.blur = () => {};

    const tell = () => {
      const column = kind === "primary" && COLUMN.matches && !sidebar.classList.contains("pst-sidebar-hidden");
      button.setAttribute("aria-expanded", String(dialog.open || column));
    };
    const observer = new MutationObserver(tell);
    observer.observe(sidebar, { attributeFilter: ["class"] });
    observer.observe(dialog, { attributeFilter: ["open"] });
    COLUMN.addEventListener("change", tell);
    tell();

    // The theme moves the sidebar's contents into the dialog and back; the style sheet shows this button there only.
    const close = document.createElement("button");
    close.type = "button";
    close.className = "drawer-close";
    close.textContent = "Close";
    close.addEventListener("click", () => dialog.close());
    sidebar.prepend(close);

    // A link into the same page would scroll behind the dialog. Followed once the dialog has closed and given back
    // the focus, it takes the focus along.
    dialog.addEventListener("click", (event) => {
      const link = event.target.closest("a[href*='#']");
      if (!link || link.pathname !== window.location.pathname || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      dialog.addEventListener("close", () => link.click(), { once: true });
      dialog.close();
    });
  };

  prepare("primary", "Chapters");
  prepare("secondary", "On this page");
})();
