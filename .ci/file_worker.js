// Search runs in a worker, which a browser does not start for pages opened from a disk: there a
// hidden frame takes its place. Over HTTP this does nothing.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      this.inside = frame.contentWindow;
      addEventListener("message", (event) => {
        if (event.source === this.inside)
          this.dispatchEvent(new MessageEvent("message", { data: event.data }));
      });
      this.inside.document.open();
      this.inside.document.write(`<body><script>
        postMessage = (data) => parent.postMessage(data, "*");
        importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise((done) => {
          const script = document.createElement("script");
          script.src = url;
          script.onload = done;
          document.body.appendChild(script);
        })), Promise.resolve());
      </script><script src="${url}"></script>`);
      this.inside.document.close();
      this.ready = new Promise((done) => this.inside.addEventListener("load", done));
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
