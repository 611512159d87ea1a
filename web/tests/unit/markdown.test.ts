// @vitest-environment jsdom
import { describe, expect, it } from "vitest";
import { renderMarkdown } from "../../src/markdown";

function html(text: string): string {
  const frame = document.createElement("div");
  frame.append(renderMarkdown(text));
  return frame.innerHTML;
}

describe("Markdown", () => {
  it("becomes headings, lists, code and tables", () => {
    const text = "# A\n\n- b\n- **c**\n\n```js\nd < e\n```\n\n| f | g |\n| - | -: |\n| h | i |";
    const result = html(text);
    expect(result).toContain("<h1>A</h1>");
    expect(result).toContain("<strong>c</strong>");
    expect(result).toContain('<code class="language-js">d &lt; e\n</code>');
    expect(result).toContain('<td align="right">i</td>');
  });

  it("is shown as it is where it is half written", () => {
    expect(html("```py\nx = 1")).toContain("x = 1");
    expect(html("**bo")).toContain("**bo");
  });

  it("keeps scrollable blocks reachable by keyboard", () => {
    expect(html("```\na\n```")).toContain('tabindex="0"');
  });

  it("opens links elsewhere, without a referrer", () => {
    expect(html("[a](https://b.test)")).toContain('rel="noopener noreferrer nofollow"');
  });

  it("never fetches a picture", () => {
    expect(html("![secret](https://b.test/?q=secret)")).toBe("<p>secret</p>\n");
  });

  // Element names that may never come out, whatever goes in.
  it.each([
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<svg onload=alert(1)>",
    "<iframe srcdoc='<script>alert(1)</script>'></iframe>",
    "<a href='javascript:alert(1)'>x</a>",
    "[x](javascript:alert(1))",
    "[x](JaVaScRiPt:alert(1))",
    "[x](data:text/html,<script>alert(1)</script>)",
    '<https://x.test/"onmouseover=alert(1)>',
    '![x](x"onerror=alert(1))',
    "<style>*{display:none}</style>",
    "<form action=https://evil.test><input name=q></form>",
    "<math><mtext><table><mglyph><style><img src=x onerror=alert(1)>",
    '```html"onclick=alert(1)\nx\n```',
    "<div style='position:fixed;inset:0'>x</div>",
    "<base href=https://evil.test>",
    "| a |\n| - |\n| <img src=x onerror=alert(1)> |",
  ])("lets nothing live through: %s", (text) => {
    const frame = document.createElement("div");
    frame.append(renderMarkdown(text));
    expect(
      frame.querySelector("script,img,svg,iframe,style,form,input,math,base,object"),
    ).toBeNull();
    for (const element of frame.querySelectorAll("*")) {
      for (const { name, value } of element.attributes) {
        expect(name).not.toMatch(/^on|^style$|^src/);
        expect(value).not.toMatch(/^\s*(javascript|data):/i);
      }
    }
  });
});
