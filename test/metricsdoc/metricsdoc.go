// SPDX-License-Identifier: Apache-2.0

// Package metricsdoc compares docs/metrics.md with the descriptions of the collectors.
package metricsdoc

import (
	"flag"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	dto "github.com/prometheus/client_model/go"
)

var update = flag.Bool("update", false, "rewrite the sections of docs/metrics.md")

// ours is the prefix of the metrics of this project. Other metrics belong to libraries.
const ours = "semmoe_"

// Check lints all metrics of a registry, and compares the metrics of the project with a section of docs/metrics.md at
// path. A described metric without a series is an error, because only a series contains the type of its metric.
func Check(t *testing.T, path, section string, registry *prometheus.Registry) {
	t.Helper()
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	problems, err := promlint.NewWithMetricFamilies(families).Lint()
	if err != nil {
		t.Fatal(err)
	}
	for _, problem := range problems {
		t.Errorf("%s: %s", problem.Metric, problem.Text)
	}
	families = slices.DeleteFunc(families, func(f *dto.MetricFamily) bool { return !strings.HasPrefix(f.GetName(), ours) })
	gathered := map[string]bool{}
	for _, family := range families {
		gathered[family.GetName()] = true
	}
	for _, name := range described(registry) {
		if strings.HasPrefix(name, ours) && !gathered[name] {
			t.Errorf("%s has no series, so that its type is unknown: create one in this test", name)
		}
	}

	document, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	begin, end := fmt.Sprintf("<!-- metrics: %s -->\n", section), "<!-- end of metrics -->\n"
	before, rest, begins := strings.Cut(string(document), begin)
	found, after, ends := strings.Cut(rest, end)
	if !begins || !ends {
		t.Fatalf("%s lacks the lines %q and %q", path, begin, end)
	}
	want := table(families)
	if *update {
		if err := os.WriteFile(path, []byte(before+begin+want+end+after), 0o644); err != nil {
			t.Fatal(err)
		}
		found = want
	}
	if diff := cmp.Diff(want, found); diff != "" {
		t.Errorf("%s is out of date in section %s (-collectors +document): run this test with -args -update:\n%s", path, section, diff)
	}
	for label := range labels(families) {
		if !strings.Contains(before, "\n| `"+label+"` |") {
			t.Errorf("%s does not describe the bound on the values of label %s", path, label)
		}
	}
}

var nameOf = regexp.MustCompile(`fqName: "([^"]+)"`)

// described returns the names of all metrics that the collectors of a registry describe.
func described(registry *prometheus.Registry) []string {
	descriptions := make(chan *prometheus.Desc)
	go func() {
		registry.Describe(descriptions)
		close(descriptions)
	}()
	names := map[string]bool{}
	for description := range descriptions {
		if match := nameOf.FindStringSubmatch(description.String()); match != nil {
			names[match[1]] = true
		}
	}
	return slices.Sorted(maps.Keys(names))
}

// table returns a Markdown table of metrics.
func table(families []*dto.MetricFamily) string {
	var text strings.Builder
	text.WriteString("| metric | type | labels | meaning |\n| --- | --- | --- | --- |\n")
	for _, family := range families {
		names := slices.Sorted(maps.Keys(labels([]*dto.MetricFamily{family})))
		for i, name := range names {
			names[i] = "`" + name + "`"
		}
		fmt.Fprintf(&text, "| `%s` | %s | %s | %s |\n", family.GetName(), strings.ToLower(family.GetType().String()), strings.Join(names, ", "),
			strings.ReplaceAll(family.GetHelp(), "|", `\|`))
	}
	return text.String()
}

// labels returns the names of the labels of metrics.
func labels(families []*dto.MetricFamily) map[string]bool {
	names := map[string]bool{}
	for _, family := range families {
		for _, metric := range family.Metric {
			for _, label := range metric.Label {
				names[label.GetName()] = true
			}
		}
	}
	return names
}
