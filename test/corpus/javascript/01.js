export class EventEmitter {
  #listeners = new Map();

  on(name, listener) {
    if (typeof listener !== 'function') {
      throw new TypeError(`listener of ${name} is not a function`);
    }
    const known = this.#listeners.get(name) ?? new Set();
    known.add(listener);
    this.#listeners.set(name, known);
    return () => this.off(name, listener);
  }

  once(name, listener) {
    const stop = this.on(name, (...args) => {
      stop();
      listener(...args);
    });
    return stop;
  }

  off(name, listener) {
    const known = this.#listeners.get(name);
    if (!known?.delete(listener)) return false;
    if (known.size === 0) this.#listeners.delete(name);
    return true;
  }

  emit(name, ...args) {
    for (const listener of [...(this.#listeners.get(name) ?? [])]) {
      listener.apply(this, args);
    }
    return this;
  }
}
