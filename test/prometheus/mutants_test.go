// SPDX-License-Identifier: Apache-2.0

package alerts

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/promql/parser"
	"sigs.k8s.io/yaml"
)

// turned maps each comparison operator to the reversed one.
var turned = map[parser.ItemType]parser.ItemType{
	parser.GTR: parser.LSS, parser.LSS: parser.GTR, parser.GTE: parser.LTE, parser.LTE: parser.GTE, parser.EQLC: parser.NEQ, parser.NEQ: parser.EQLC,
}

// mutants returns variants of a rule with one change each: a reversed comparison, a doubled or halved number (0 becomes
// 10), or another duration. The key describes the change.
func mutants(t *testing.T, rule rulefmt.Rule) map[string]rulefmt.Rule {
	t.Helper()
	all := map[string]rulefmt.Rule{}
	// changed adds the rule with a change to the node at the given position in the visiting order.
	changed := func(at int, name string, change func(parser.Node)) {
		parsed, err := expression.ParseExpr(rule.Expr)
		if err != nil {
			t.Fatal(err)
		}
		visited := 0
		parser.Inspect(parsed, func(node parser.Node, _ []parser.Node) error {
			if visited == at && node != nil {
				change(node)
			}
			visited++
			return nil
		})
		mutant := rule
		mutant.Expr = parsed.String()
		all[fmt.Sprintf("node %d: %s: %s", at, name, mutant.Expr)] = mutant
	}
	parsed, err := expression.ParseExpr(rule.Expr)
	if err != nil {
		t.Fatal(err)
	}
	at := 0
	parser.Inspect(parsed, func(node parser.Node, _ []parser.Node) error {
		switch n := node.(type) {
		case *parser.BinaryExpr:
			if _, compares := turned[n.Op]; compares {
				changed(at, "turned round", func(node parser.Node) { b := node.(*parser.BinaryExpr); b.Op = turned[b.Op] })
			}
		case *parser.NumberLiteral:
			for _, factor := range []float64{0.5, 2} {
				changed(at, fmt.Sprintf("times %v", factor), func(node parser.Node) {
					if number := node.(*parser.NumberLiteral); number.Val == 0 {
						number.Val = 10
					} else {
						number.Val *= factor
					}
				})
			}
		}
		at++
		return nil
	})
	for _, factor := range []float64{0.5, 2} {
		mutant := rule
		mutant.For = model.Duration(time.Duration(float64(rule.For) * factor))
		all[fmt.Sprintf("for %s", mutant.For)] = mutant
	}
	return all
}

// writeRule writes a rule file with only the given rule, and returns its path.
func writeRule(t *testing.T, rule rulefmt.Rule) string {
	t.Helper()
	text, err := yaml.Marshal(map[string]any{"groups": []any{map[string]any{"name": "alone", "rules": []any{map[string]any{
		"alert": rule.Alert, "expr": rule.Expr, "for": rule.For.String(), "labels": rule.Labels, "annotations": rule.Annotations,
	}}}}})
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "rules.yaml")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// TestRuleMutations checks that some case of TestAlertsOnSeries detects every change of a rule.
func TestRuleMutations(t *testing.T) {
	for _, rule := range parsedRules(t) {
		first := map[string]int{} // first step of the unchanged rule, by case; another rule of the same name may fire as well
		for name, tc := range onSeries {
			if ruleOf(tc.alert) == rule.Alert+" "+rule.Labels["severity"] {
				first[name] = firstStep(t, writeRule(t, rule), tc)
			}
		}
		for name, mutant := range mutants(t, rule) {
			file, noticed := writeRule(t, mutant), false
			for of, step := range first {
				if noticed = firstStep(t, file, onSeries[of]) != step; noticed {
					break
				}
			}
			if !noticed {
				t.Errorf("%s: no case detects the change %s", rule.Alert, name)
			}
		}
	}
}
