// SPDX-License-Identifier: Apache-2.0

package alerts

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql/parser"
)

// dashboard holds the tested fields of a Grafana dashboard.
type dashboard struct {
	Templating struct {
		List []struct {
			Name       string `json:"name"`
			Type       string `json:"type"`
			Definition string `json:"definition"`
		} `json:"list"`
	} `json:"templating"`
	Links  []link  `json:"links"`
	Panels []panel `json:"panels"`
}

type link struct {
	URL string `json:"url"`
}

type panel struct {
	ID          int    `json:"id"`
	Type        string `json:"type"`
	Title       string `json:"title"`
	Description string `json:"description"`
	Links       []link `json:"links"`
	GridPos     struct{ X, Y, W, H int }
	Datasource  struct {
		UID string `json:"uid"`
	} `json:"datasource"`
	Targets []struct {
		Expr         string `json:"expr"`
		LegendFormat string `json:"legendFormat"`
		Datasource   struct {
			UID string `json:"uid"`
		} `json:"datasource"`
	} `json:"targets"`
}

// query is one query of the dashboard.
type query struct {
	// name is the panel's title and the number of the query.
	name, expr, legend string
}

func loadDashboard(t *testing.T) dashboard {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(repository, "charts", "semmoe-operator", "dashboards", "semmoe.json"))
	if err != nil {
		t.Fatal(err)
	}
	var d dashboard
	if err := json.Unmarshal(text, &d); err != nil {
		t.Fatal(err)
	}
	return d
}

// queries returns all queries of the dashboard, for all namespaces and MoEDeployments, with rates over one minute.
// Series of one cluster have no label cluster, and the variable is empty.
func (d dashboard) queries() []query {
	variables := strings.NewReplacer("$cluster", "", "$namespace", ".*", "$deployment", ".*", "$__rate_interval", "1m")
	var all []query
	for _, p := range d.Panels {
		for i, target := range p.Targets {
			all = append(all, query{fmt.Sprintf("%s #%d", p.Title, i+1), variables.Replace(target.Expr), target.LegendFormat})
		}
	}
	return all
}

// exposed returns the labels of every series that a query may use, by the name of the series.
func exposed(t *testing.T) map[string][]string {
	t.Helper()
	known := documentedMetrics(t)
	for name, of := range known {
		for _, suffix := range []string{"_bucket", "_count", "_sum"} { // series of histograms; for other types, the demo test finds no data
			known[name+suffix] = append([]string{"le"}, of...)
		}
	}
	for name, of := range libraryMetrics {
		known[name] = of
	}
	return known
}

var legendLabel = regexp.MustCompile(`\{\{(\w+)\}\}`)

// TestDashboardMetricsExist checks that every metric and label in queries and legends is exposed. A panel of
// another metric would be empty permanently.
func TestDashboardMetricsExist(t *testing.T) {
	known := exposed(t)
	for _, q := range loadDashboard(t).queries() {
		if strings.Contains(q.expr, "$") {
			t.Errorf("%s has an unknown variable: %s", q.name, q.expr)
		}
		parsed, err := expression.ParseExpr(q.expr)
		if err != nil {
			t.Errorf("%s: %v in:\n%s", q.name, err, q.expr)
			continue
		}
		var has []string // labels of the query's metrics
		parser.Inspect(parsed, func(node parser.Node, _ []parser.Node) error {
			selector, ok := node.(*parser.VectorSelector)
			if !ok {
				return nil
			}
			of, ok := known[selector.Name]
			if !ok {
				t.Errorf("%s uses metric %s, which is not in docs/metrics.md", q.name, selector.Name)
			}
			has = append(append(has, of...), targetLabels...)
			if !slices.ContainsFunc(selector.LabelMatchers, func(m *labels.Matcher) bool { return m.Name == "cluster" && m.Type == labels.MatchEqual }) {
				t.Errorf("%s shows %s of all clusters, not only of the selected one", q.name, selector.Name)
			}
			for _, matcher := range selector.LabelMatchers {
				if matcher.Name != labels.MetricName && matcher.Name != "cluster" && !slices.Contains(of, matcher.Name) && !slices.Contains(targetLabels, matcher.Name) {
					t.Errorf("%s uses label %s of %s, which only has the labels %v", q.name, matcher.Name, selector.Name, of)
				}
			}
			return nil
		})
		var kept []string // labels that the query's series can have
		parser.Inspect(parsed, func(node parser.Node, _ []parser.Node) error {
			if aggregation, ok := node.(*parser.AggregateExpr); ok {
				kept = append(kept, aggregation.Grouping...)
				for _, label := range aggregation.Grouping {
					if !slices.Contains(has, label) {
						t.Errorf("%s keeps the label %s, which none of its metrics has", q.name, label)
					}
				}
			}
			return nil
		})
		for _, match := range legendLabel.FindAllStringSubmatch(q.legend, -1) {
			if len(kept) > 0 && !slices.Contains(kept, match[1]) || !slices.Contains(has, match[1]) {
				t.Errorf("the legend of %s uses label %s, which its series do not have", q.name, match[1])
			}
		}
	}
}

const documentation = "https://github.com/semmoe/operator/blob/main/"

// TestDashboardLayout checks that panels do not overlap, have a title and a description, use the selected data
// source, and link to existing pages.
func TestDashboardLayout(t *testing.T) {
	d := loadDashboard(t)
	var links []link
	links = append(links, d.Links...)
	cells, ids, runbooks := map[[2]int]string{}, map[int]string{}, map[string]bool{}
	for _, p := range d.Panels {
		if other, taken := ids[p.ID]; taken {
			t.Errorf("%s and %s have the same ID %d", p.Title, other, p.ID)
		}
		ids[p.ID] = p.Title
		if p.GridPos.X+p.GridPos.W > 24 {
			t.Errorf("%s is wider than 24 columns", p.Title)
		}
		for x := range p.GridPos.W {
			for y := range p.GridPos.H {
				cell := [2]int{p.GridPos.X + x, p.GridPos.Y + y}
				if other, taken := cells[cell]; taken {
					t.Fatalf("%s overlaps %s", p.Title, other)
				}
				cells[cell] = p.Title
			}
		}
		if p.Type == "row" {
			continue
		}
		if p.Title == "" || p.Description == "" || len(p.Targets) == 0 {
			t.Errorf("panel %d (%q) has no title, description or query", p.ID, p.Title)
		}
		links = append(links, p.Links...)
		const chosen = "${datasource}"
		if p.Datasource.UID != chosen {
			t.Errorf("%s uses the data source %q, want the variable datasource", p.Title, p.Datasource.UID)
		}
		for _, target := range p.Targets {
			if target.Datasource.UID != chosen {
				t.Errorf("%s uses the data source %q, want the variable datasource", p.Title, target.Datasource.UID)
			}
		}
	}
	for _, l := range links {
		path, ours := strings.CutPrefix(l.URL, documentation)
		path, _, _ = strings.Cut(path, "#")
		if _, err := os.Stat(filepath.Join(repository, filepath.FromSlash(path))); !ours || err != nil {
			t.Errorf("the page of link %s is missing: %v", l.URL, err)
		}
		runbooks[strings.TrimSuffix(filepath.Base(path), ".md")] = true
	}
	for _, rule := range parsedRules(t) {
		if !runbooks[rule.Alert] {
			t.Errorf("no panel links to the page of %s", rule.Alert)
		}
	}
	for _, v := range d.Templating.List {
		if v.Type == "query" && v.Definition != "label_values(semmoe_condition, cluster)" &&
			!strings.HasPrefix(v.Definition, "label_values(semmoe_condition{cluster=\"$cluster\", kind=\"MoEDeployment\"") {
			t.Errorf("variable %s has the unexpected definition %s", v.Name, v.Definition)
		}
	}
}
