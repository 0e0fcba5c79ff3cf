// A browser starts no worker for a page that it reads from disk. There the search runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(script) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      this.loaded = new Promise((resolve) => frame.addEventListener("load", () => resolve(frame.contentWindow)));
      frame.answer = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      frame.srcdoc = `<script>postMessage = frameElement.answer</script><script src="${script}"></script>`;
      document.documentElement.append(frame);
    }
    postMessage(data) {
      this.loaded.then((frame) => frame.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
