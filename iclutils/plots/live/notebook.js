// The end of the module that anywidget loads in a notebook, behind the scripts of the figure.
export default {
  render({ model, el }) {
    const { buffer, byteOffset, byteLength } = model.get("weights"); // a DataView
    const data = new Uint8Array(buffer.slice(byteOffset, byteOffset + byteLength));
    Live.open(el, "induction", { ...model.get("part"), data });
  },
};
