import { useLayoutEffect, useRef } from "preact/hooks";
import { copyText } from "../clipboard";
import { renderMarkdown } from "../markdown";

/** A model's text, with a copy button on each block of code. */
export function MarkdownView({ text }: { readonly text: string }) {
  const ref = useRef<HTMLDivElement>(null);
  useLayoutEffect(() => {
    const fragment = renderMarkdown(text);
    for (const block of fragment.querySelectorAll("pre")) addCopyButton(block);
    ref.current?.replaceChildren(fragment);
  }, [text]);
  return <div class="markdown" ref={ref} />;
}

function addCopyButton(block: HTMLPreElement): void {
  const code = block.textContent ?? "";
  const frame = document.createElement("div");
  frame.className = "code-frame";
  const button = document.createElement("button");
  button.type = "button";
  button.className = "copy-code";
  button.textContent = "Copy";
  button.addEventListener("click", () => {
    void copyText(code).then((is_copied) => {
      button.textContent = is_copied ? "Copied" : "Not allowed";
      setTimeout(() => (button.textContent = "Copy"), 1500);
    });
  });
  block.replaceWith(frame);
  frame.append(block, button);
}
