// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/semmoe/operator/internal/engine"
)

// kinds are the kinds of mechanisms in the order of docs/engine-releases.md.
var kinds = []engine.Kind{
	engine.FlagKind, engine.VariableKind, engine.RouteKind, engine.HeaderKind, engine.MemberKind, engine.MetricKind, engine.ValueKind, engine.DraftKind,
}

// mechanismTable returns the mechanisms of an engine as a Markdown table, ordered by kind and name.
func mechanismTable(a engine.Adapter) string {
	all := slices.Clone(a.Mechanisms)
	slices.SortStableFunc(all, func(x, y engine.Mechanism) int {
		return cmp.Or(cmp.Compare(slices.Index(kinds, x.Kind), slices.Index(kinds, y.Kind)), strings.Compare(x.Names[0], y.Names[0]))
	})
	var text strings.Builder
	fmt.Fprintf(&text, "### %s: %s to %s\n\n", a.Type, a.Oldest, a.Newest)
	text.WriteString("| mechanism | | first | last | source | |\n| --- | --- | --- | --- | --- | --- |\n")
	for _, m := range all {
		last := ""
		if m.Last.Known() {
			last = m.Last.String()
		}
		fmt.Fprintf(&text, "| `%s` | %s | %s | %s | %s | %s |\n", strings.Join(m.Names, "`, `"), m.Kind, m.First, last, m.Source, m.Evidence)
	}
	return text.String()
}
