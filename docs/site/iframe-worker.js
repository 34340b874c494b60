/* Search where the site is opened as a file: browsers start no Worker from file://, so a hidden frame takes its place.
 * Only what the theme's search asks of a Worker is here: messages both ways, and importScripts. */
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(address) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = async (...addresses) => {
        for (const each of addresses) await this.load(each);
      };
      this.ready = this.load(new URL(address, document.baseURI).href);
    }

    load(address) {
      return new Promise((loaded) => {
        const script = this.frame.contentDocument.createElement("script");
        script.src = address;
        script.onload = loaded;
        this.frame.contentDocument.body.append(script);
      });
    }

    async postMessage(data) {
      await this.ready;
      this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }
  };
  window.Worker = window.IFrameWorker;
}
