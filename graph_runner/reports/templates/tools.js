"use strict";
// tools of the pages' scripts, which follow in the same element; strings become text, never markup

function make(tag, properties, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

function draw(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const byId = (id) => document.getElementById(id);

/* The state of a page, which is what the address's fragment says; of a select element only what it offers. */
function fromAddress(defaults, selects) {
  const given = new URLSearchParams(location.hash.slice(1));
  return Object.fromEntries(Object.entries(defaults).map(([key, value]) => {
    const text = given.get(key) ?? value;
    return [key, selects.includes(key) && ![...byId(key).options].some((option) => option.value === text) ? value : text];
  }));
}

function toAddress(state, defaults) {
  const changed = Object.entries(state).filter(([key, value]) => value !== defaults[key]);
  history.replaceState(null, "", `#${new URLSearchParams(changed)}`);
}
