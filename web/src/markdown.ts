/** A model's Markdown as DOM nodes that can do nothing but be read.
 *
 * Model output is untrusted: it passes through DOMPurify with a short list of elements, and never
 * through a string that is set as HTML.
 */

import DOMPurify, { type Config } from "dompurify";
import { Marked } from "marked";

const marked = new Marked({ gfm: true, breaks: true, async: false });

const CONFIG: Config & { RETURN_DOM_FRAGMENT: true } = {
  // prettier-ignore
  ALLOWED_TAGS: [
    "a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li",
    "ol", "p", "pre", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
  ],
  ALLOWED_ATTR: ["href", "title", "start", "align", "class"],
  // Their values are no addresses, to which alone the pattern applies.
  ADD_URI_SAFE_ATTR: ["align", "start"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

marked.use({
  renderer: {
    // HTML that a model writes is shown as it is written.
    html: ({ text }) => escapeHtml(text),
    // Pictures would tell their host what was asked: what they show is named instead.
    image: ({ text, href }) => escapeHtml(text || href),
  },
});

export function renderMarkdown(text: string): DocumentFragment {
  const html = marked.parse(text) as string;
  const fragment = DOMPurify.sanitize(html, CONFIG);
  for (const element of fragment.querySelectorAll("[class]")) {
    // Only the language of a code block is a class that means something.
    const language = /^language-[\w+#.-]+$/.exec(element.className);
    if (element.tagName !== "CODE" || language === null) element.removeAttribute("class");
  }
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  // Scrollable regions must be reachable by keyboard.
  for (const block of fragment.querySelectorAll("pre")) makeScrollable(block, "Code");
  for (const table of fragment.querySelectorAll("table")) {
    const frame = table.ownerDocument.createElement("div");
    frame.className = "table-frame";
    table.replaceWith(frame);
    frame.append(table);
    makeScrollable(frame, "Table");
  }
  return fragment;
}

function makeScrollable(element: HTMLElement, label: string): void {
  element.tabIndex = 0;
  element.setAttribute("role", "group");
  element.setAttribute("aria-label", label);
}

function escapeHtml(text: string): string {
  return text.replace(/[&<>"']/g, (character) => `&#${character.charCodeAt(0)};`);
}
