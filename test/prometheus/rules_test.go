// SPDX-License-Identifier: Apache-2.0

package alerts

import (
	"context"
	"encoding/json"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/common/model"
	"github.com/prometheus/common/promslog"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/promql/promqltest"
	"github.com/prometheus/prometheus/rules"
	"github.com/prometheus/prometheus/util/teststorage"
	"sigs.k8s.io/yaml"
)

var (
	repository = filepath.Join("..", "..")
	alertsFile = filepath.Join(repository, "charts", "semmoe-operator", "files", "alerts.yaml")
	expression = parser.NewParser(parser.Options{})
)

// parsedRules returns the alert rules of the rule file, parsed by Prometheus.
func parsedRules(t *testing.T) []rulefmt.Rule {
	t.Helper()
	groups, errs := rulefmt.ParseFile(alertsFile, false, model.UTF8Validation, expression, promslog.NewNopLogger())
	if len(errs) > 0 {
		t.Fatal(errs)
	}
	var all []rulefmt.Rule
	for _, group := range groups.Groups {
		all = append(all, group.Rules...)
	}
	return all
}

// loadedRules returns the alert groups on a storage, which can be evaluated at any time.
func loadedRules(t *testing.T, storage *teststorage.TestStorage) []*rules.Group {
	t.Helper()
	return loadedFrom(t, storage, alertsFile)
}

// loadedFrom returns the alert groups of a rule file on a storage.
func loadedFrom(t *testing.T, storage *teststorage.TestStorage, file string) []*rules.Group {
	t.Helper()
	engine := promqltest.NewTestEngine(t, false, 5*time.Minute, 1_000_000)
	manager := rules.NewManager(&rules.ManagerOptions{
		QueryFunc: rules.EngineQueryFunc(engine, storage), Appendable: storage, Queryable: storage, Context: t.Context(),
		NotifyFunc: func(context.Context, string, ...*rules.Alert) {}, ExternalURL: &url.URL{},
		Logger: promslog.NewNopLogger(), Registerer: prometheus.NewRegistry(), Parser: expression,
	})
	byKey, errs := manager.LoadGroups(time.Minute, labels.EmptyLabels(), "", nil, false, file)
	if len(errs) > 0 {
		t.Fatal(errs)
	}
	var groups []*rules.Group
	for _, group := range byKey {
		groups = append(groups, group)
	}
	return groups
}

// firing evaluates groups at a time, and returns the firing alerts in the format of describe.
func firing(t *testing.T, groups []*rules.Group, at time.Time) []string {
	t.Helper()
	var names []string
	for _, group := range groups {
		group.Eval(t.Context(), at)
		for _, rule := range group.AlertingRules() {
			if err := rule.LastError(); err != nil {
				t.Fatalf("%s: %v", rule.Name(), err)
			}
			rule.ForEachActiveAlert(func(alert *rules.Alert) {
				if alert.State == rules.StateFiring {
					names = append(names, describe(t, alert))
				}
			})
		}
	}
	slices.Sort(names)
	return names
}

// describe returns the name, the severity and the object of an alert. It fails the test if an annotation could not be
// expanded.
func describe(t *testing.T, alert *rules.Alert) string {
	t.Helper()
	of := alert.Labels.Get("namespace") + "/" + alert.Labels.Get("name") + alert.Labels.Get("pod")
	for _, annotation := range []string{"summary", "description"} {
		text := alert.Annotations.Get(annotation)
		if strings.Contains(text, "error expanding template") || strings.Contains(text, "<no value>") || strings.Contains(text, " /") || strings.Contains(text, "/ ") {
			t.Errorf("%s of %s: %s", annotation, alert.Labels, text)
		}
	}
	return strings.Join([]string{alert.Labels.Get("alertname"), alert.Labels.Get("severity"), strings.Trim(of, "/")}, " ")
}

// libraryMetrics holds metrics of libraries that rules and the dashboard may use, with their labels. TestAlertsOfProcesses
// and the demo scrape these metrics.
var libraryMetrics = map[string][]string{
	"leader_election_master_status":                    {"name"},
	"controller_runtime_reconcile_errors_total":        {"controller"},
	"controller_runtime_reconcile_time_seconds_bucket": {"controller", "le"},
	"workqueue_depth":                                  {"controller"},
	"rest_client_requests_total":                       {"code"},
}

// targetLabels are the labels that the monitors add.
var targetLabels = []string{"namespace", "name", "pod"}

// TestRuleMetricsExist checks that every metric and label in the rules is exposed. A rule with another metric
// would never fire.
func TestRuleMetricsExist(t *testing.T) {
	known := documentedMetrics(t)
	for name, labels := range libraryMetrics {
		known[name] = labels
	}
	for _, rule := range parsedRules(t) {
		parsed, err := expression.ParseExpr(rule.Expr)
		if err != nil {
			t.Fatal(err)
		}
		selectors := 0
		parser.Inspect(parsed, func(node parser.Node, _ []parser.Node) error {
			selector, ok := node.(*parser.VectorSelector)
			if !ok {
				return nil
			}
			selectors++
			exposed, ok := known[selector.Name]
			if !ok {
				t.Errorf("%s uses metric %s, which is not in docs/metrics.md", rule.Alert, selector.Name)
			}
			for _, matcher := range selector.LabelMatchers {
				if matcher.Name != labels.MetricName && !slices.Contains(exposed, matcher.Name) && !slices.Contains(targetLabels, matcher.Name) {
					t.Errorf("%s uses label %s of %s, which only has the labels %v", rule.Alert, matcher.Name, selector.Name, exposed)
				}
			}
			return nil
		})
		if selectors == 0 {
			t.Errorf("%s uses no metric", rule.Alert)
		}
	}
}

var documentedMetric = regexp.MustCompile("(?m)^\\| `(semmoe_[a-z_]+)` \\| [a-z]+ \\| ([^|]*) \\|")

// documentedMetrics returns the labels of the metrics in docs/metrics.md. The tests of the collectors compare
// docs/metrics.md with the exposed metrics.
func documentedMetrics(t *testing.T) map[string][]string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(repository, "docs", "metrics.md"))
	if err != nil {
		t.Fatal(err)
	}
	metrics := map[string][]string{}
	for _, match := range documentedMetric.FindAllStringSubmatch(string(text), -1) {
		metrics[match[1]] = strings.FieldsFunc(match[2], func(r rune) bool { return strings.ContainsRune("`, ", r) })
	}
	if len(metrics) == 0 {
		t.Fatal("docs/metrics.md has no metric")
	}
	return metrics
}

// TestManifests checks that the monitoring manifests have only fields that the Prometheus Operator knows, and the same
// rules as the rule file.
func TestManifests(t *testing.T) {
	manifests := renderedManifests(t)
	text, err := os.ReadFile(alertsFile)
	if err != nil {
		t.Fatal(err)
	}
	var want, got any
	if err := yaml.Unmarshal(text, &want); err != nil {
		t.Fatal(err)
	}
	spec, err := json.Marshal(manifests.rule.Spec)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(spec, &got); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("the PrometheusRule differs from the rule file (-file +PrometheusRule):\n%s", diff)
	}
	if len(manifests.services) != 2 || len(manifests.serviceMonitors) != 2 || len(manifests.podMonitors) != 1 {
		t.Errorf("%d Services, %d ServiceMonitors and %d PodMonitors", len(manifests.services), len(manifests.serviceMonitors), len(manifests.podMonitors))
	}
	// A ServiceMonitor selects Services by label, and their ports by name.
	for _, monitor := range manifests.serviceMonitors {
		found := 0
		for _, service := range manifests.services {
			if selects(t, &monitor.Spec.Selector, service.Labels) && service.Spec.Ports[0].Name == monitor.Spec.Endpoints[0].Port {
				found++
			}
		}
		if found != 1 {
			t.Errorf("ServiceMonitor %s selects %d Services", monitor.Name, found)
		}
	}
}

// ruleOf returns the name and the severity of an alert in the format of describe.
func ruleOf(alert string) string {
	fields := strings.Fields(alert)
	return fields[0] + " " + fields[1]
}
