// SPDX-License-Identifier: Apache-2.0

package browser

import (
	"context"
	"flag"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
)

var (
	chromium = flag.String("chromium", "", "path of Chromium")
	axe      = flag.String("axe", "", "file axe.min.js of axe-core")
	reports  = flag.String("reports", "", "directory with report pages")
	site     = flag.String("site", "", "directory with the documentation site")
)

// pageTime is the maximum time of one check of one page: a busy machine needs a multiple of the usual second.
const pageTime = 2 * time.Minute

// view is a window of the browser.
type view struct {
	name   string
	width  int64
	scheme string
}

// views are a desktop and the narrowest phones in use, in both color schemes.
var views = []view{
	{"desktop, light", 1280, "light"},
	{"desktop, dark", 1280, "dark"},
	{"phone, light", 390, "light"},
	{"phone, dark", 390, "dark"},
}

func TestReports(t *testing.T) {
	pages := pagesOf(t, *reports)
	browser := start(t)
	for _, page := range pages {
		for _, v := range views {
			t.Run(page.name+", "+v.name, func(t *testing.T) { browser.check(t, page, v, expandDetails) })
		}
		t.Run(page.name+", keyboard", func(t *testing.T) { browser.checkKeyboard(t, page, "summary, .scroll, a[href]") })
	}
}

// TestSite checks some pages in each view, and each of the others, which have the same styles, in one.
func TestSite(t *testing.T) {
	pages := pagesOf(t, *site)
	browser := start(t)
	inAll := []string{"index.html", "getting-started.html", "troubleshooting.html", "metrics.html"}
	for i, page := range pages {
		for at, v := range views {
			if at == i%len(views) || slices.Contains(inAll, page.name) {
				t.Run(page.name+", "+v.name, func(t *testing.T) { browser.check(t, page, v, "") })
			}
		}
	}
	at := slices.IndexFunc(pages, func(p page) bool { return p.name == "getting-started.html" })
	if at < 0 {
		t.Fatalf("%s has no page getting-started.html", *site)
	}
	t.Run("keyboard", func(t *testing.T) { browser.checkKeyboard(t, pages[at], "[role=main] a[href], [role=main] pre") })
	t.Run("search", func(t *testing.T) { browser.checkSearch(t, pages[at]) })
}

// page is a page of a local server.
type page struct{ name, address string }

// pagesOf serves a directory and returns its pages.
func pagesOf(t *testing.T, directory string) []page {
	t.Helper()
	if directory == "" || *axe == "" {
		t.Skip("not called by make browser")
	}
	server := httptest.NewServer(http.FileServer(http.Dir(directory)))
	t.Cleanup(server.Close)
	var pages []page
	err := filepath.WalkDir(directory, func(path string, _ os.DirEntry, err error) error {
		if err == nil && filepath.Ext(path) == ".html" {
			name := strings.TrimPrefix(filepath.ToSlash(path), filepath.ToSlash(directory)+"/")
			pages = append(pages, page{name, server.URL + "/" + name})
		}
		return err
	})
	if err != nil || len(pages) == 0 {
		t.Fatalf("no pages in %s: %v", directory, err)
	}
	return pages
}

// browser is a running Chromium, with the program of axe-core.
type browser struct {
	ctx context.Context
	axe string
}

func start(t *testing.T) *browser {
	t.Helper()
	program, err := os.ReadFile(*axe)
	if err != nil {
		t.Fatal(err)
	}
	// As root, Chromium does not start in its sandbox. The pages are our own.
	options := append(slices.Clone(chromedp.DefaultExecAllocatorOptions[:]), chromedp.ExecPath(*chromium), chromedp.NoSandbox)
	allocator, cancel := chromedp.NewExecAllocator(context.Background(), options...)
	t.Cleanup(cancel)
	ctx, cancel := chromedp.NewContext(allocator)
	t.Cleanup(cancel)
	if err := chromedp.Do(ctx); err != nil {
		t.Fatalf("start %s: %v", *chromium, err)
	}
	return &browser{ctx, string(program)}
}

// tab is an open page.
type tab struct {
	*testing.T
	ctx context.Context
}

// open opens a page in a new tab. An error in the page fails the test.
func (b *browser) open(t *testing.T, p page, v view) *tab {
	t.Helper()
	ctx, cancel := chromedp.NewContext(b.ctx)
	t.Cleanup(cancel)
	if err := chromedp.Listen(ctx, func(event any) {
		if e, ok := event.(*runtime.EventExceptionThrown); ok {
			t.Errorf("%s: %s", p.name, describe(e.ExceptionDetails))
		}
	}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel = context.WithTimeout(ctx, pageTime)
	t.Cleanup(cancel)
	media := emulation.SetEmulatedMediaParams{Features: []*emulation.MediaFeature{
		{Name: "prefers-color-scheme", Value: v.scheme}, {Name: "prefers-reduced-motion", Value: "reduce"},
	}}
	if _, err := chromedp.Call(ctx, emulation.SetEmulatedMedia, media); err != nil {
		t.Fatal(err)
	}
	opened := &tab{t, ctx}
	opened.do(chromedp.EmulateViewport(v.width, 844), chromedp.Navigate(p.address))
	return opened
}

func describe(e *runtime.ExceptionDetails) string {
	text := fmt.Sprintf("%s, line %d of %s", e.Text, e.LineNumber+1, e.URL)
	if e.Exception != nil {
		text += ": " + e.Exception.Description
	}
	return text
}

func (t *tab) do(actions ...chromedp.Action[chromedp.Void]) {
	t.Helper()
	if err := chromedp.Do(t.ctx, actions...); err != nil {
		t.Fatal(err)
	}
}

// script runs a script in the page.
func (t *tab) script(expression string) {
	t.Helper()
	t.do(chromedp.Evaluate[chromedp.Void](expression))
}

// evaluate returns the value of an expression in the page. It waits for a promise.
func evaluate[T any](t *tab, expression string) T {
	t.Helper()
	value, err := chromedp.Run(t.ctx, chromedp.Evaluate[T](expression, chromedp.EvalAwaitPromise))
	if err != nil {
		t.Fatal(err)
	}
	return value
}

// expandDetails makes the tables of figures visible: rules do not apply to hidden content.
const expandDetails = `document.querySelectorAll("details").forEach(d => d.open = true)`

// findings runs axe-core. A finding is a rule with the elements that violate it.
const findings = `axe.run(document, {resultTypes: ["violations"]}).then(r => r.violations.map(v =>
	v.id + " (" + v.impact + "): " + v.help + v.nodes.slice(0, 5).map(n => "\n    " + n.target.join(" ") + ": " +
	n.any.concat(n.all, n.none).map(c => c.message).join("; ")).join("")))`

// outside lists the elements that make the page scroll sideways. The document may not be wider than the window; tables
// scroll in their own region.
const outside = `document.documentElement.scrollWidth <= window.innerWidth ? [] :
	[...document.body.querySelectorAll("*")].filter(e => e.getBoundingClientRect().right > window.innerWidth + 1).slice(0, 5)
	.map(e => e.tagName + "." + e.className + " ends at " + Math.round(e.getBoundingClientRect().right) + " px")`

func (b *browser) check(t *testing.T, p page, v view, prepare string) {
	tab := b.open(t, p, v)
	tab.script(prepare)
	if wide := evaluate[[]string](tab, outside); len(wide) > 0 {
		t.Errorf("the page scrolls sideways at %d px:\n  %s", v.width, strings.Join(wide, "\n  "))
	}
	tab.script(b.axe)
	for _, violation := range evaluate[[]string](tab, findings) {
		t.Errorf("axe-core: %s", violation)
	}
}

// focus is the element with the focus: its number among the expected ones, or -1 for another element, and why a user
// cannot see that it has the focus. Ended is set if the browser has passed the last element.
type focus struct {
	At      int    `json:"at"`
	Ended   bool   `json:"ended"`
	Problem string `json:"problem"`
}

// focused returns the focus.
const focused = `(() => {
	const e = document.activeElement;
	if (!e || e === document.body) return {at: -1, ended: true, problem: ""};
	const box = e.getBoundingClientRect(), style = getComputedStyle(e);
	let problem = "";
	if (box.bottom <= 0 || box.top >= window.innerHeight) problem = "is not in the window";
	else if ((style.outlineStyle === "none" || parseFloat(style.outlineWidth) === 0) && style.boxShadow === "none") problem = "has no visible focus";
	return {at: window.expected.indexOf(e), ended: false, problem: problem && e.outerHTML.slice(0, 120) + " " + problem};
})()`

// checkKeyboard presses the tabulator until the focus has visited every element. Each selected element, if visible, must
// receive the focus, and show it. Enter must open details.
func (b *browser) checkKeyboard(t *testing.T, p page, selector string) {
	tab := b.open(t, p, views[0])
	expected := evaluate[[]string](tab, fmt.Sprintf(`(window.expected = [...document.querySelectorAll(%q)].filter(e => e.checkVisibility() &&
		(e.tagName !== "PRE" || e.scrollWidth > e.clientWidth))).map(e => e.outerHTML.slice(0, 120))`, selector))
	if len(expected) == 0 {
		t.Fatalf("%s has no element %q", p.name, selector)
	}
	visited := map[int]bool{}
	for range 10*len(expected) + 200 {
		tab.do(chromedp.KeyEvent(kb.Tab))
		now := evaluate[focus](tab, focused)
		if now.Problem != "" {
			t.Error(now.Problem)
		}
		if now.Ended || now.At >= 0 && visited[now.At] {
			break
		}
		visited[now.At] = true
	}
	for at, element := range expected {
		if !visited[at] {
			t.Errorf("the keyboard does not reach %s", element)
		}
	}
	details := evaluate[int](tab, `document.querySelectorAll("details").length`)
	if details == 0 {
		return
	}
	tab.script(`document.querySelector("details summary").focus()`)
	tab.do(chromedp.KeyEvent(kb.Enter))
	if open := evaluate[int](tab, `document.querySelectorAll("details[open]").length`); open != 1 {
		t.Errorf("Enter opened %d of %d details, not the one with the focus", open, details)
	}
}

// checkSearch finds pages of the site with the keyboard: S opens the search, as the help dialog of the site says.
func (b *browser) checkSearch(t *testing.T, p page) {
	tab := b.open(t, p, views[0])
	query := chromedp.CSS("#mkdocs-search-query")
	tab.do(chromedp.KeyEvent("s"), chromedp.WaitVisible(query))
	// The protocol sends the character S as well, although the page prevents it.
	tab.script(`document.querySelector("#mkdocs-search-query").value = ""`)
	tab.do(chromedp.SendKeys(query, "local activation rate"))
	// Until the page has built its index, it ignores keys.
	found := `(document.querySelector("#mkdocs-search-query").dispatchEvent(new Event("keyup")), !!document.querySelector("#mkdocs-search-results article a"))`
	if _, err := chromedp.Run(tab.ctx, chromedp.Poll[bool](found, chromedp.WithPollingInterval(100*time.Millisecond), chromedp.WithPollingTimeout(0))); err != nil {
		t.Fatalf("the search finds no page: %v", err)
	}
}
