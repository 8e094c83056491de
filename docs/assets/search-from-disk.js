// Search in a site that is read from a folder. Browsers start no worker for a page of file://, so the
// script of the worker runs in a hidden frame, which is given the few names that it uses.
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(url) {
      this.frame = document.body.appendChild(document.createElement("iframe"));
      this.frame.hidden = true;
      const { contentDocument: page, contentWindow: inside } = this.frame;
      inside.postMessage = (data) => setTimeout(() => this.onmessage?.({ data }));
      const script = page.createElement("script");
      script.src = url;
      this.ready = new Promise((loaded, failed) => Object.assign(script, { onload: loaded, onerror: failed }));
      page.head.append(script);
    }

    postMessage(data) {
      const deliver = () => this.frame.contentWindow?.onmessage?.({ data });
      this.ready.then(deliver).catch((error) => this.onerror?.(error));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
