// Read-outs under the pointer: the value of the line at that time.
for (const chart of document.querySelectorAll("[data-plot]")) {
  const data = JSON.parse(chart.dataset.plot);
  const plot = chart.querySelector(".plot");
  const cursor = Object.assign(document.createElement("div"), { className: "cursor", hidden: true });
  const readout = Object.assign(document.createElement("div"), { className: "readout", hidden: true });
  plot.append(cursor, readout);
  plot.addEventListener("pointerleave", () => { cursor.hidden = readout.hidden = true; });
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    const time = share * data.right;
    const after = data.x.findIndex((x) => x > time);
    const k = after < 0 ? data.x.length - 1 : Math.max(0, after - 1);
    readout.textContent = `${time.toFixed(1)} s\n${data.name}  ${data.y[k].toLocaleString()} ${data.unit}`;
    cursor.hidden = readout.hidden = false;
    cursor.style.left = `${100 * share}%`;
    readout.style.left = share < 0.5 ? `calc(${100 * share}% + 8px)` : "auto";
    readout.style.right = share < 0.5 ? "auto" : `calc(${100 - 100 * share}% + 8px)`;
  });
}
