// A picture that is shown smaller than it is opens in full size when it is clicked.
document.querySelectorAll(".bd-article img:not(a img)").forEach((picture) => {
  const link = document.createElement("a");
  link.href = picture.src;
  link.className = "enlarge";
  link.title = "Open in full size";
  picture.replaceWith(link);
  link.append(picture);
  link.addEventListener("click", (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return; // a new tab or window
    event.preventDefault();
    const dialog = document.createElement("dialog");
    dialog.className = "enlarged";
    dialog.append(picture.cloneNode());
    dialog.addEventListener("click", () => dialog.close());
    dialog.addEventListener("close", () => dialog.remove());
    document.body.append(dialog);
    dialog.showModal();
  });
});
