// SPDX-License-Identifier: Apache-2.0

package advice

import (
	"fmt"
	"slices"
	"strings"

	"github.com/semmoe/operator/internal/kubectl/terminal"
)

// Text formats the advice for a terminal.
func (a Advice) Text(s terminal.Style) string {
	result := "No change is recommended."
	tone := terminal.Plain
	if a.Patch != nil {
		result, tone = fmt.Sprintf("A change is recommended: kubectl semmoe advise %s -n %s -o patch prints it.", a.Name, a.Namespace), terminal.Strong
	}
	var out strings.Builder
	out.WriteString(s.Paragraph(terminal.Words(result, tone), 0))
	out.WriteString("\n")
	var rows [][]terminal.Cell
	for _, item := range a.Items {
		times, other := "", item.Advised
		if item.Before > 0 && item.After > 0 {
			times = fmt.Sprintf("%.0f → %.0f µs (%+.1f%%)", item.Before, item.After, 100*(item.After/item.Before-1))
		}
		if other == "" {
			other = "-"
		}
		rows = append(rows, []terminal.Cell{{Text: item.Setting}, {Text: item.Now}, {Text: other}, {Text: times}, {Text: string(item.Verdict) + ": " + item.Why}})
	}
	out.WriteString(s.Table([]string{"SETTING", "NOW", "ADVISED", "MOE LAYER, MODELLED", "RESULT"}, rows))
	out.WriteString("\n")
	out.WriteString(s.Paragraph(terminal.Words(a.basis(), terminal.Faint), 0))
	return out.String()
}

// basis describes what the figures are computed from, and what is not modelled.
func (a Advice) basis() string {
	plan := "plan " + a.Plan
	if !a.InService {
		plan += ", which is not in service (exchanges as in the default placement)"
	}
	sizes := slices.Clone(a.BatchTokens)
	slices.Sort(sizes)
	text := "Computed from " + plan
	if a.Hardware != "" {
		text += ", for " + a.Hardware
	}
	if len(sizes) > 0 {
		source := "that the plan was made for"
		if a.Observed {
			source = "that engines report"
		}
		text += fmt.Sprintf(", at the batch sizes %s: %s tokens", source, strings.Trim(strings.ReplaceAll(fmt.Sprint(sizes), " ", ", "), "[]"))
	}
	return text + ". A layer is dispatch, routed experts and combine. Not modelled: attention, which may overlap exchanges too."
}
