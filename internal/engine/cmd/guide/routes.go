// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"strings"

	"github.com/semmoe/operator/internal/engine"
)

// routeTable returns the routes of the engines as a Markdown table, ordered by path. A cell lists the ways in which the
// rank is read, with the releases if there are several.
func routeTable(adapters []engine.Adapter) string {
	var text strings.Builder
	text.WriteString("| route | prompt | limit | stream |")
	for _, a := range adapters {
		fmt.Fprintf(&text, " `%s` |", a.Type)
	}
	text.WriteString("\n| --- | --- | --- | --- |" + strings.Repeat(" --- |", len(adapters)) + "\n")
	for _, api := range engine.APIs() {
		prompt := "–"
		switch {
		case len(api.Prompt) > 0:
			prompt = "`" + strings.Join(api.Prompt, "`, `") + "`"
		case api.Computes:
			prompt = "length of the body"
		}
		limit := "–"
		if api.Limit != "" {
			limit = "`" + api.Limit + "`"
		}
		name := "`" + api.Path + "`"
		if api.Put {
			name += ", also PUT"
		}
		if api.Stateful {
			name += ", stateful"
		}
		fmt.Fprintf(&text, "| %s | %s | %s | %s |", name, prompt, limit, map[bool]string{true: "yes", false: "–"}[api.Streams])
		for _, a := range adapters {
			fmt.Fprintf(&text, " %s |", routeCell(a, api))
		}
		text.WriteString("\n")
	}
	return text.String()
}

// routeCell returns how a route is pinned, and in which releases if not in all.
func routeCell(a engine.Adapter, api engine.API) string {
	var spans []engine.Route // rows of one route, joined if they are pinned alike
	for _, r := range a.Routes {
		switch last := len(spans) - 1; {
		case r.Path != api.Path:
		case last >= 0 && spans[last].Pin == r.Pin:
			spans[last].Last = r.Last
		default:
			spans = append(spans, r)
		}
	}
	var parts []string
	for _, r := range spans {
		part := string(r.Pin)
		switch {
		case !api.Computes:
			part = "yes"
		case r.Pin == engine.ByMember:
			part = "`" + a.RankRoutes.Field + "`"
		}
		if r.First.Compare(a.Oldest) > 0 {
			part += " from " + r.First.String()
		}
		if r.Last.Known() {
			part += " to " + r.Last.String()
		}
		parts = append(parts, part)
	}
	return cmp.Or(strings.Join(parts, "; "), "–")
}
