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

// parsedRules are the alerts as Prometheus reads a rule file.
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

// loadedRules are the groups of alerts over a storage, to be evaluated at any time.
func loadedRules(t *testing.T, storage *teststorage.TestStorage) []*rules.Group {
	t.Helper()
	return loadedFrom(t, storage, alertsFile)
}

// loadedFrom are those of a rule file.
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

// firing evaluates groups at a time, and returns the alerts that fire then, as text: name, severity and what they are of.
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

// describe says what fires, and fails where an annotation could not be filled in.
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

// libraryMetrics are those that rules and the dashboard may use although the project does not define them; TestProcessesFire and the
// demo see them.
var libraryMetrics = map[string][]string{
	"leader_election_master_status":                    {"name"},
	"controller_runtime_reconcile_errors_total":        {"controller"},
	"controller_runtime_reconcile_time_seconds_bucket": {"controller", "le"},
	"workqueue_depth":                                  {"controller"},
	"rest_client_requests_total":                       {"code"},
}

// targetLabels are given by the monitors.
var targetLabels = []string{"namespace", "name", "pod"}

// A rule that asks for a metric or a label that nobody exposes is silent for ever.
func TestRulesUseWhatIsExposed(t *testing.T) {
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
				t.Errorf("%s asks for %s, which docs/metrics.md does not have", rule.Alert, selector.Name)
			}
			for _, matcher := range selector.LabelMatchers {
				if matcher.Name != labels.MetricName && !slices.Contains(exposed, matcher.Name) && !slices.Contains(targetLabels, matcher.Name) {
					t.Errorf("%s asks for label %s of %s, which has %v", rule.Alert, matcher.Name, selector.Name, exposed)
				}
			}
			return nil
		})
		if selectors == 0 {
			t.Errorf("%s asks for no metric", rule.Alert)
		}
	}
}

var documentedMetric = regexp.MustCompile("(?m)^\\| `(semmoe_[a-z_]+)` \\| [a-z]+ \\| ([^|]*) \\|")

// documentedMetrics are the labels of the metrics in docs/metrics.md, which the tests of the collectors compare with these.
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

// The Prometheus operator knows every field of what the chart gives it, and gets the same rules as a rule file has.
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

// ruleOf is the name and severity of what describe describes.
func ruleOf(alert string) string {
	fields := strings.Fields(alert)
	return fields[0] + " " + fields[1]
}
