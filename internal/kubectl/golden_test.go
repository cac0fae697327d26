// SPDX-License-Identifier: Apache-2.0

package kubectl

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/kubectl/terminal"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// golden is one run of the plugin with a golden file for its output.
type golden struct {
	// command contains the arguments after "kubectl semmoe".
	command string
	objects []client.Object
	width   int
	color   bool
	// getError is the error of every request to the API server. listError returns the error of a list request.
	getError  error
	listError func(list client.ObjectList) error
	// createError returns the error of creating an object, also in a dry run.
	createError func(object client.Object, options *client.CreateOptions) error
	// metrics are the metrics pages of pods, by name.
	metrics map[string]string
	// polls is the number of polls of a watch. between changes objects between two polls.
	polls   int
	between func(ctx context.Context, c client.Client) error
	code    int
}

// run runs the plugin. It returns standard output followed by standard error, and the exit code.
func (g golden) run(t *testing.T) (shown string, code int) {
	t.Helper()
	var out, errs bytes.Buffer
	style := terminal.Style{Width: g.width, Color: g.color}
	p := &program{Out: &out, Err: &errs, Getenv: func(string) string { return "" }, Now: func() time.Time { return now }, style: style, errStyle: style}
	cluster := g.cluster(t)
	p.open = func() (*Cluster, error) { return cluster, nil }
	p.Wait = func(ctx context.Context, _ time.Duration) error {
		if g.polls--; g.polls <= 0 {
			return context.Canceled
		}
		return g.between(ctx, cluster.Client)
	}
	code = p.run(t.Context(), append([]string{"kubectl-semmoe"}, strings.Fields(g.command)...))
	fmt.Fprintf(&out, "%s", errs.String())
	return out.String(), code
}

func (g golden) cluster(t *testing.T) *Cluster {
	t.Helper()
	scheme, err := newScheme()
	if err != nil {
		t.Fatal(err)
	}
	c := fake.NewClientBuilder().WithScheme(scheme).WithObjects(g.objects...).WithInterceptorFuncs(interceptor.Funcs{
		Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, object client.Object, options ...client.GetOption) error {
			if g.getError != nil {
				return g.getError
			}
			return c.Get(ctx, key, object, options...)
		},
		List: func(ctx context.Context, c client.WithWatch, list client.ObjectList, options ...client.ListOption) error {
			if g.getError != nil {
				return g.getError
			}
			if g.listError != nil {
				if err := g.listError(list); err != nil {
					return err
				}
			}
			return c.List(ctx, list, options...)
		},
		Create: func(ctx context.Context, c client.WithWatch, object client.Object, options ...client.CreateOption) error {
			if g.createError != nil {
				if err := g.createError(object, (&client.CreateOptions{}).ApplyOptions(options)); err != nil {
					return err
				}
			}
			return c.Create(ctx, object, options...)
		},
	}).Build()
	return &Cluster{Client: c, Namespace: namespace, Metrics: func(_ context.Context, pod *corev1.Pod) ([]byte, error) {
		text, ok := g.metrics[pod.Name]
		if !ok {
			return nil, forbidden("pods/proxy", pod.Name)
		}
		return []byte(text), nil
	}}
}

func forbidden(resource, name string) error {
	return apierrors.NewForbidden(schema.GroupResource{Group: "", Resource: resource}, name, errors.New(`user "ann" cannot do that in the namespace "llm"`))
}

var (
	errUnreachable = &url.Error{Op: "Get", URL: "https://10.0.0.1:6443/apis", Err: &net.OpError{Op: "dial", Net: "tcp", Err: errors.New("connection refused")}}
	errNoKind      = &apimeta.NoKindMatchError{GroupKind: schema.GroupKind{Group: "semmoe.io", Kind: "MoEDeployment"}, SearchedVersions: []string{"v1alpha1"}}
	errRefused     = apierrors.NewForbidden(schema.GroupResource{Group: "semmoe.io", Resource: "moedeployments"}, "qwen", errors.New(`user "ann" cannot get resource "moedeployments" in API group "semmoe.io" in the namespace "llm"`))
	errNoPath      = apierrors.NewGenericServerResponse(http.StatusNotFound, "get", schema.GroupResource{Group: "semmoe.io", Resource: "moedeployments"}, "", "the server could not find the requested resource", 0, true)
)

func concat(lists ...[]client.Object) []client.Object {
	var all []client.Object
	for _, list := range lists {
		all = append(all, list...)
	}
	return all
}

// awaiting returns a deployment with a first plan that waits for approval, and the objects that belong to it.
func awaiting(changes ...func(*semmoev1.MoEDeployment)) []client.Object {
	return concat([]client.Object{deployment(changes...), planned("qwen-c65ee2b4", firstDigest, 40*time.Minute)}, profiles(), stateful("qwen-38df6bb89e", "38df6bb89e", "", true), routers())
}

// inCanary returns a deployment with a second plan in its canary phase, a canary pod that crashes, and the objects that
// belong to it.
func inCanary(changes ...func(*semmoev1.MoEDeployment)) []client.Object {
	return concat(
		[]client.Object{
			deployment(append([]func(*semmoev1.MoEDeployment){canary}, changes...)...),
			planned("qwen-c65ee2b4", firstDigest, 40*time.Minute), planned("qwen-5d0d71aa", secondDigest, 10*time.Minute, replan),
		},
		profiles(), stateful("qwen-38df6bb89e", "38df6bb89e", firstDigest, true), candidate(), routers(),
	)
}

// candidate returns a canary revision with a pod that crashes repeatedly.
func candidate() []client.Object {
	objects := stateful("qwen-b293798526", "b293798526", secondDigest, false)
	objects[0].SetAnnotations(map[string]string{semmoev1.AnnotationRollout: semmoev1.RolloutCanary})
	return objects
}

func TestGolden(t *testing.T) {
	testdata, err := filepath.Abs("testdata")
	if err != nil {
		t.Fatal(err)
	}
	for name, g := range goldens() {
		t.Run(name, func(t *testing.T) {
			t.Chdir(t.TempDir()) // the command writes files to the working directory
			shown, code := g.run(t)
			if code != g.code {
				t.Errorf("exit code %d, want %d:\n%s", code, g.code, shown)
			}
			if strings.Contains(shown, "\x1b") != g.color {
				t.Errorf("colors: %t, want %t", !g.color, g.color)
			}
			got := fmt.Sprintf("$ kubectl semmoe %s\n%s", g.command, strings.ReplaceAll(shown, "\x1b", "␛"))
			file := filepath.Join(testdata, name+".txt")
			if *update {
				if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), got); diff != "" {
				t.Errorf("%s (-want +got; -args -update rewrites the file):\n%s", file, diff)
			}
		})
	}
	files, err := filepath.Glob(filepath.Join(testdata, "*.txt"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		if _, used := goldens()[strings.TrimSuffix(filepath.Base(file), ".txt")]; !used {
			t.Errorf("%s is not used by any test", file)
		}
	}
}

// TestDocumentation verifies that every output in the documentation equals a golden file.
func TestDocumentation(t *testing.T) {
	page, err := os.ReadFile(filepath.Join("..", "..", "docs", "kubectl.md"))
	if err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(filepath.Join("testdata", "*.txt"))
	if err != nil {
		t.Fatal(err)
	}
	outputs := map[string]bool{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		outputs[strings.TrimSpace(string(text))] = true
	}
	blocks := strings.Split(string(page), "```text\n")[1:]
	if len(blocks) < 5 {
		t.Fatalf("the documentation has only %d outputs", len(blocks))
	}
	for _, block := range blocks {
		shown, _, _ := strings.Cut(block, "\n```")
		if !outputs[strings.TrimSpace(shown)] {
			t.Errorf("no golden file has this output:\n%s", shown)
		}
	}
}

// goldens returns all runs, by the names of their golden files.
func goldens() map[string]golden {
	all := map[string]golden{}
	for _, some := range []map[string]golden{statusGoldens(), planGoldens(), replanGoldens(), topGoldens(), adviseGoldens(), writeGoldens(), errorGoldens()} {
		for name, g := range some {
			all[name] = g
		}
	}
	return all
}

func statusGoldens() map[string]golden {
	return map[string]golden{
		"status":            {command: "status qwen", objects: awaiting(), width: 120},
		"status-pipe":       {command: "status qwen", objects: inCanary()},
		"status-80":         {command: "status qwen", objects: inCanary(), width: 80},
		"status-40":         {command: "status qwen", objects: inCanary(), width: 40},
		"status-color":      {command: "status qwen", objects: inCanary(), width: 100, color: true},
		"status-json":       {command: "status qwen -o json", objects: inCanary()},
		"status-profiling":  {command: "status", objects: concat([]client.Object{deployment(unplanned)}, profiling(), stateful("qwen-38df6bb89e", "38df6bb89e", "", true), routers()), width: 100},
		"status-all":        {command: "status -A", objects: append(awaiting(), elsewhere()), width: 100},
		"status-none":       {command: "status", width: 80},
		"status-restricted": {command: "status qwen", objects: awaiting(), width: 100, listError: withoutPods},
		"status-watch":      {command: "status --watch", objects: concat([]client.Object{deployment(unplanned)}, profiling()), polls: 3, between: answerMore},
	}
}

func unplanned(moed *semmoev1.MoEDeployment) {
	moed.Status.Plan, moed.Status.LAR = "", nil
	set(moed, "Profiled", "False", "Profiling", "AffinityProfile qwen-3e5a82bb: 840 of 2000 requests are answered")
	set(moed, "Planned", "False", "WaitingForProfile", "The plan is made once the model has been profiled")
	set(moed, "RolledOut", "False", "NoPlan", "There is no plan to roll out")
}

// elsewhere returns a deployment of another namespace that is not reconciled yet.
func elsewhere() client.Object {
	moed := &semmoev1.MoEDeployment{ObjectMeta: named("tiny", time.Minute)}
	moed.Namespace = "research"
	return moed
}

func withoutPods(list client.ObjectList) error {
	if _, pods := list.(*corev1.PodList); pods {
		return forbidden("pods", "")
	}
	return nil
}

func tensorParallel(moed *semmoev1.MoEDeployment) {
	moed.Spec.Parallelism.Attention = semmoev1.AttentionTensorParallel
}

func shuffled(moed *semmoev1.MoEDeployment) {
	moed.Spec.Placement.TokenShuffle = semmoev1.TokenShuffleEnabled
}

// unshuffled changes a plan to one for an engine that does not shuffle tokens.
func unshuffled(p *semmoev1.PlacementPlan) { p.Spec.TokenShuffle = semmoev1.TokenShuffleDisabled }

// ofCounts changes a plan to one with only new tables, made from token counts.
func ofCounts(p *semmoev1.PlacementPlan) {
	p.Status.Tier, p.Status.Forecast = semmoev1.TierTables, nil
	p.Status.Comparison = &semmoev1.PlanComparison{Reason: "new tables predict current activations 56.5% more accurately; counts do not show the gain in time"}
}

// answerMore updates the progress of a profiling Job between two polls.
func answerMore(ctx context.Context, c client.Client) error {
	profile := &semmoev1.AffinityProfile{}
	if err := c.Get(ctx, client.ObjectKey{Namespace: namespace, Name: "qwen-3e5a82bb"}, profile); err != nil {
		return err
	}
	profile.Status.Progress.RequestsDone = 1700
	return c.Update(ctx, profile)
}

// inService changes a deployment to one that serves with its first plan.
func inService(moed *semmoev1.MoEDeployment) {
	moed.Status.PlanDigest = firstPlan
	set(moed, "RolledOut", "True", "RolledOut", "All replicas serve under plan b509accef77e719e")
}

func planGoldens() map[string]golden {
	mapped := func(changes ...func(*semmoev1.MoEDeployment)) []client.Object {
		first, held := published("qwen-c65ee2b4", []int{0, 1, 2, 3}, []int{0, 1, 2, 3})
		second, heldToo := published("qwen-5d0d71aa", []int{0, 2, 1, 3}, []int{0, 1, 2, 3}, replan)
		second.Spec.Current.PlanDigest = first.Status.PlanDigest
		return []client.Object{deployment(changes...), first, held, second, heldToo, inspected()}
	}
	first, held := published("qwen-c65ee2b4", []int{0, 1, 2, 3}, []int{0, 1, 2, 3})
	other, heldToo := published("other", []int{0, 1, 2, 3, 4, 5}, []int{0, 1, 2, 3, 4, 5})
	damaged := held.DeepCopy()
	damaged.Data["placement.json"] += " "
	unsolved := func(p *semmoev1.PlacementPlan) {
		p.Status = semmoev1.PlacementPlanStatus{Conditions: conditions("Ready", "False", "Solving", "12 of 40 steps are done")}
	}
	failed := func(p *semmoev1.PlacementPlan) {
		p.Annotations = map[string]string{semmoev1.AnnotationFailed + "b293798526": "LocalityWorse: its local activation rate is 24.5% over 32 sampled requests"}
	}
	slower := func(p *semmoev1.PlacementPlan) {
		p.Status.Verdict = semmoev1.VerdictNoGainExpected
		p.Status.Forecast.LayerNanos, p.Status.Forecast.BaselineLayerNanos, p.Status.Forecast.Hardware = 124700, 121300, "h200-nvlink"
	}
	return map[string]golden{
		"explain":              {command: "explain qwen-c65ee2b4", objects: awaiting(), width: 100},
		"explain-replan":       {command: "explain 602077", objects: inCanary(), width: 100},
		"explain-pays":         {command: "explain qwen-5d0d71aa", objects: paying(), width: 100},
		"explain-40":           {command: "explain qwen-5d0d71aa", objects: inCanary(), width: 40},
		"explain-color":        {command: "explain qwen-5d0d71aa", objects: inCanary(), width: 80, color: true},
		"explain-json":         {command: "explain qwen-5d0d71aa -o json", objects: inCanary()},
		"explain-worthless":    {command: "explain poor", objects: append(awaiting(), planned("poor", secondDigest, time.Minute, worthless, failed)), width: 100},
		"explain-slower":       {command: "explain slow", objects: append(awaiting(), planned("slow", secondDigest, time.Minute, slower)), width: 100},
		"explain-unsolved":     {command: "explain new", objects: append(awaiting(), planned("new", secondDigest, time.Minute, unsolved)), width: 100},
		"explain-counts":       {command: "explain 602077", objects: append(awaiting(), planned("qwen-5d0d71aa", secondDigest, time.Minute, replan, ofCounts)), width: 100},
		"explain-in-service":   {command: "explain qwen-c65ee2b4", objects: awaiting(inService), width: 100},
		"diff":                 {command: "diff qwen-c65ee2b4 qwen-5d0d71aa", objects: mapped(), width: 100},
		"diff-40":              {command: "diff qwen-c65ee2b4 qwen-5d0d71aa", objects: mapped(), width: 40},
		"diff-json":            {command: "diff qwen-c65ee2b4 qwen-5d0d71aa -o json", objects: mapped()},
		"diff-same":            {command: "diff qwen-c65ee2b4 qwen-c65ee2b4", objects: mapped(), width: 100},
		"diff-unshuffled":      {command: "diff qwen-c65ee2b4 qwen-5d0d71aa", objects: mappedUnshuffled(), width: 100},
		"diff-shapes":          {command: "diff qwen-c65ee2b4 other", objects: []client.Object{first, held, other, heldToo}, width: 100, code: exitState},
		"diff-damaged":         {command: "diff qwen-c65ee2b4 qwen-c65ee2b4", objects: []client.Object{first, damaged}, width: 100, code: exitError},
		"diff-no-map":          {command: "diff qwen-c65ee2b4 qwen-c65ee2b4", objects: []client.Object{first}, width: 100, code: exitNotFound},
		"diff-unsolved":        {command: "diff new new", objects: []client.Object{planned("new", secondDigest, time.Minute, unsolved)}, width: 100, code: exitState},
		"report":               {command: "report qwen-5d0d71aa --out page.html", objects: paying(), width: 100},
		"report-replaced-gone": {command: "report qwen-5d0d71aa --out page.html", objects: paying()[2:], width: 100},
		"report-without-file":  {command: "report qwen-c65ee2b4", objects: mapped(), width: 100, code: exitUsage},
	}
}

func topGoldens() map[string]golden {
	// Each run has its own map, because one run changes the metrics.
	two := func() map[string]string {
		return map[string]string{"qwen-router-6b7f-0": metrics(640, 0.42, 1000), "qwen-router-6b7f-1": metrics(320, 0.36, 500)}
	}
	both := two()
	reported := func(moed *semmoev1.MoEDeployment) {
		moed.Status.Routing = &semmoev1.RoutingStatus{Ranks: []semmoev1.RankShare{{Rank: 0, ShareMilli: 540}, {Rank: 1, ShareMilli: 460}}}
	}
	more := func(context.Context, client.Client) error {
		both["qwen-router-6b7f-0"] = metrics(700, 0.43, 1800)
		return nil
	}
	// The metrics of one router cannot be read at the second poll, but at the third.
	missed := two()
	laterTexts := []map[string]string{
		{"qwen-router-6b7f-0": metrics(700, 0.43, 1800), "qwen-router-6b7f-1": "up 1\n"},
		{"qwen-router-6b7f-0": metrics(700, 0.43, 1900), "qwen-router-6b7f-1": metrics(330, 0.36, 560)},
	}
	later := func(context.Context, client.Client) error {
		maps.Copy(missed, laterTexts[0])
		laterTexts = laterTexts[1:]
		return nil
	}
	return map[string]golden{
		"top-missed":    {command: "top qwen --watch", objects: inCanary(), metrics: missed, polls: 3, between: later, width: 100},
		"top":           {command: "top qwen", objects: inCanary(), metrics: two(), width: 100},
		"top-40":        {command: "top qwen", objects: inCanary(), metrics: two(), width: 40},
		"top-color":     {command: "top", objects: inCanary(), metrics: two(), width: 80, color: true},
		"top-json":      {command: "top qwen -o json", objects: inCanary(), metrics: two()},
		"top-unsampled": {command: "top qwen -o json", objects: inCanary(), metrics: map[string]string{"qwen-router-6b7f-0": metrics(0, math.NaN(), 10), "qwen-router-6b7f-1": metrics(0, math.NaN(), 0)}},
		"top-forbidden": {command: "top qwen", objects: inCanary(reported), width: 80},
		"top-broken":    {command: "top qwen", objects: inCanary(), metrics: map[string]string{"qwen-router-6b7f-0": both["qwen-router-6b7f-0"], "qwen-router-6b7f-1": "up 1\n"}, width: 80},
		"top-two-polls": {command: "top qwen --watch", objects: inCanary(), metrics: both, polls: 2, between: more},
		"top-rankless":  {command: "top qwen", objects: awaiting(tensorParallel), metrics: map[string]string{"qwen-router-6b7f-0": ranklessMetrics, "qwen-router-6b7f-1": ranklessMetrics}, width: 100},
		"top-not-found": {command: "top other", objects: inCanary(), width: 80, code: exitNotFound},
	}
}

// ranklessMetrics is the metrics page of a router that sends requests to replicas, not to ranks.
const ranklessMetrics = `# TYPE semmoe_router_requests_total counter
semmoe_router_requests_total{code="200"} 120
# TYPE semmoe_router_estimated_tokens_total counter
semmoe_router_estimated_tokens_total{rank="none"} 90000
`

// metrics returns the metrics page of a router with a number of sampled and of answered requests. Rank 0 gets three of
// five tokens.
func metrics(sampled int, rate float64, answered int) string {
	types := ""
	for _, gauge := range []string{"observed_requests", "local_activation_rate", "predicted_local_activation_rate", "saved_bytes_per_second"} {
		types += "# TYPE semmoe_" + gauge + " gauge\n"
	}
	for _, counter := range []string{"router_requests_total", "router_estimated_tokens_total", "activations_total"} {
		types += "# TYPE semmoe_" + counter + " counter\n"
	}
	saved := 3.5e6
	if sampled == 0 {
		saved = math.NaN()
	}
	return types + fmt.Sprintf(`semmoe_observed_requests %d
semmoe_local_activation_rate %v
semmoe_predicted_local_activation_rate %v
semmoe_saved_bytes_per_second %v
semmoe_router_requests_total{code="200"} %d
semmoe_router_requests_total{code="503"} 0
semmoe_router_estimated_tokens_total{rank="0"} %d
semmoe_router_estimated_tokens_total{rank="1"} %d
semmoe_activations_total{locality="local",rank="0"} %d
semmoe_activations_total{locality="remote",rank="0"} %d
semmoe_activations_total{locality="local",rank="1"} %d
semmoe_activations_total{locality="remote",rank="1"} %d
`, sampled, rate, rate-0.02, saved, answered, 60*answered, 40*answered, 24*sampled, 36*sampled, 14*sampled, 26*sampled)
}

// published returns a plan of two layers on two ranks, and its ConfigMap.
func published(name string, first, second []int, changes ...func(*semmoev1.PlacementPlan)) (*semmoev1.PlacementPlan, *corev1.ConfigMap) {
	layers := fmt.Sprintf(`{"ep_size":2,"num_experts":%d,"slots_per_rank":%d,"layers":[{"layer":1,"slots":%s},{"layer":2,"slots":%s}]}`,
		len(first), len(first)/2, strings.ReplaceAll(fmt.Sprint(first), " ", ","), strings.ReplaceAll(fmt.Sprint(second), " ", ","))
	sum := func(text string) string { return fmt.Sprintf("%x", sha256.Sum256([]byte(text))) }
	manifest := fmt.Sprintf(`{"format":"semmoe-plan/1","attention":"dp","forecast":"table","algorithm":"auto","layout_digest":%q,"files":{"placement.json":%q}}`, sum(layers), sum(layers))
	p := planned(name, sum(manifest), 10*time.Minute, changes...)
	held := &corev1.ConfigMap{ObjectMeta: ofQwen(p.Status.ConfigMap, 10*time.Minute, semmoev1.ComponentPlan), Data: map[string]string{"manifest.json": manifest, "placement.json": layers}}
	return p, held
}

// mappedUnshuffled returns two plans for an engine that does not shuffle tokens, and their ConfigMaps.
func mappedUnshuffled() []client.Object {
	messages := func(remote int32) func(*semmoev1.PlacementPlan) {
		return func(p *semmoev1.PlacementPlan) {
			p.Status.Forecast = &semmoev1.PlanForecast{LARMilli: 500, BaselineMilli: 500, RemoteRanksMilli: remote, BaselineRemoteRanksMilli: 820, LARSummary: "50.0%", BaselineSummary: "50.0%"}
		}
	}
	first, held := published("qwen-c65ee2b4", []int{0, 1, 2, 3}, []int{0, 1, 2, 3}, unshuffled, messages(700))
	second, heldToo := published("qwen-5d0d71aa", []int{0, 2, 1, 3}, []int{0, 1, 2, 3}, unshuffled, messages(640))
	return []client.Object{deployment(), first, held, second, heldToo, inspected()}
}

// inspected returns an inspection Job with the size of the checkpoint.
func inspected() client.Object {
	job := &batchv1.Job{ObjectMeta: ofQwen("qwen-inspect-1", time.Hour, semmoev1.ComponentInspect)}
	job.Annotations = map[string]string{semmoev1.AnnotationReport: `{"modelDigest":"` + modelDigest + `","moeLayers":[1,2],"experts":4,"bytes":80000000}`}
	return job
}

// paying returns the plan in service, a plan with a gain that replaces it, and the ConfigMaps of both.
func paying() []client.Object {
	first, held := published("qwen-c65ee2b4", []int{0, 1, 2, 3, 4, 5, 6, 7}, []int{0, 1, 2, 3, 4, 5, 6, 7})
	second, heldToo := published("qwen-5d0d71aa", []int{0, 2, 4, 6, 1, 3, 5, 7}, []int{0, 1, 2, 7, 4, 5, 6, 3}, replan, func(p *semmoev1.PlacementPlan) {
		p.Status.Forecast.LARMilli, p.Status.Forecast.LARSummary, p.Status.Forecast.UpperBoundMilli = 688, "68.8%", 812
		p.Status.Comparison.CandidateLARMilli, p.Status.Comparison.CandidateNanos, p.Status.Comparison.MovedExperts = 688, 74200, 6
	})
	second.Spec.Current.PlanDigest = first.Status.PlanDigest
	return []client.Object{first, held, second, heldToo}
}

// TestReport verifies that the report is written with the figures of both plans.
func TestReport(t *testing.T) {
	first, held := published("qwen-c65ee2b4", []int{0, 1, 2, 3}, []int{0, 1, 2, 3})
	second, heldToo := published("qwen-5d0d71aa", []int{0, 2, 1, 3}, []int{0, 1, 2, 3}, replan)
	second.Spec.Current.PlanDigest = first.Status.PlanDigest
	file := filepath.Join(t.TempDir(), "report.html")
	shown, code := golden{command: "report qwen-5d0d71aa --out " + file, objects: []client.Object{first, held, second, heldToo}}.run(t)
	page, err := os.ReadFile(file)
	if code != 0 || err != nil || !strings.Contains(shown, "Written to "+file) {
		t.Fatalf("exit code %d, %v:\n%s", code, err, shown)
	}
	for _, part := range []string{
		"<!DOCTYPE html>", "qwen-5d0d71aa", first.Status.Plan,
		"<strong>35.2%</strong><span>27.6% under the plan that it replaces, on the last 180 sampled requests</span>",
		"<strong>−10.2%</strong><span>109 µs, versus 121 µs under the plan that it replaces, hardware profile h200-nvlink</span>",
	} {
		if !strings.Contains(strings.ToLower(string(page)), strings.ToLower(part)) {
			t.Errorf("the page lacks %q", part)
		}
	}
	if strings.Contains(string(page), "pass --trace") {
		t.Error("the page advises a flag that kubectl semmoe report does not have")
	}
	if _, code := (golden{command: "report qwen-5d0d71aa --out /nowhere/report.html", objects: []client.Object{first, held, second, heldToo}}).run(t); code != exitUsage {
		t.Errorf("unwritable file: exit code %d", code)
	}
}

func writeGoldens() map[string]golden {
	paused := func(moed *semmoev1.MoEDeployment) { moed.Spec.Reconciliation = semmoev1.ReconciliationPaused }
	pinned := func(moed *semmoev1.MoEDeployment) {
		moed.Spec.Placement.PlanRef = &semmoev1.PlanReference{Name: "qwen-c65ee2b4"}
	}
	advisory := func(moed *semmoev1.MoEDeployment) { moed.Spec.Placement.Approval = semmoev1.ApprovalAdvisory }
	newTables := func(changes ...func(*semmoev1.MoEDeployment)) []client.Object {
		return append(awaiting(changes...), planned("qwen-5d0d71aa", secondDigest, time.Minute, replan, ofCounts))
	}
	ofTokens := func(changes ...func(*semmoev1.PlacementPlan)) []client.Object {
		spread := func(p *semmoev1.PlacementPlan) { p.Spec.Attention = semmoev1.AttentionTensorParallel }
		return append(awaiting(tensorParallel), planned("tokens", secondDigest, time.Minute, append(changes, spread)...))
	}
	marked := func(key string, change ...func(*semmoev1.PlacementPlan)) *semmoev1.PlacementPlan {
		return planned("marked", secondDigest, time.Minute, append(change, func(p *semmoev1.PlacementPlan) { p.Annotations = map[string]string{key: "m"} })...)
	}
	own := func(p *semmoev1.PlacementPlan) {
		p.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(deployment(), semmoev1.GroupVersion.WithKind("MoEDeployment"))}
	}
	theirs := func(p *semmoev1.PlacementPlan) { p.Labels[semmoev1.LabelDeployment] = "mixtral" }
	wide := func(p *semmoev1.PlacementPlan) { p.Spec.ExpertParallelSize = 4 }
	wanted := func(moed *semmoev1.MoEDeployment) {
		moed.Status.Plan = "marked"
		set(moed, "RolledOut", "False", "OutputChanged", "The outputs of the engine change with plan 6020771edb47c715")
	}
	held := func(moed *semmoev1.MoEDeployment) {
		moed.Annotations = map[string]string{semmoev1.AnnotationApprove: secondPlan}
		set(moed, "RolledOut", "False", "RollbackPending", "Plan 6020771edb47c715 has failed on its canary")
	}
	serving := func(moed *semmoev1.MoEDeployment) { moed.Status.PlanDigest = secondPlan }
	const failed, changed = semmoev1.AnnotationFailed + "b293798526", semmoev1.AnnotationOutputChanged + "b293798526"
	approved := func(moed *semmoev1.MoEDeployment) {
		moed.Annotations = map[string]string{semmoev1.AnnotationApprove: firstPlan}
		set(moed, "RolledOut", "False", "CanaryStarting", "Plan b509accef77e719e is tried on 1 of 2 replicas")
	}
	// onTrial is a change of the spec whose canary proves nothing.
	onTrial := func(moed *semmoev1.MoEDeployment) {
		moed.Status.Rollout = &semmoev1.RolloutStatus{Phase: semmoev1.RolloutPhaseCanary, Since: before(3 * time.Minute), StableRevision: "38df6bb89e", CandidateRevision: "b293798526"}
		moed.Status.Revision, moed.Status.PendingPlan = "b293798526", "b293798526"
		set(moed, "RolledOut", "False", "CanaryInconclusive", "Revision b293798526 runs as a canary on 1 of 2 replicas")
	}
	return map[string]golden{
		"approve-change":       {command: "approve qwen -o json", objects: awaiting(onTrial)},
		"rollback-change":      {command: "rollback qwen -o json", objects: awaiting(onTrial)},
		"rollback-change-text": {command: "rollback qwen", objects: awaiting(onTrial), width: 100},

		"approve":            {command: "approve qwen", objects: awaiting(underArgo), width: 100},
		"approve-dry-run":    {command: "approve qwen --dry-run=server", objects: awaiting(), width: 100},
		"approve-again":      {command: "approve qwen", objects: awaiting(approved), width: 100},
		"approve-json":       {command: "approve qwen b509acce -o json", objects: awaiting()},
		"approve-nothing":    {command: "approve qwen", objects: inCanary(), width: 100, code: exitState},
		"approve-advisory":   {command: "approve qwen", objects: awaiting(advisory), width: 100, code: exitState},
		"approve-worthless":  {command: "approve qwen poor", objects: append(awaiting(), planned("poor", secondDigest, time.Minute, worthless)), width: 100, code: exitState},
		"rollback":           {command: "rollback qwen", objects: inCanary(), width: 100},
		"rollback-to":        {command: "rollback qwen --to qwen-c65ee2b4", objects: inCanary(underArgo), width: 100},
		"rollback-to-tables": {command: "rollback qwen --to 602077", objects: newTables(), width: 100},
		"rollback-unpin":     {command: "rollback qwen --unpin", objects: awaiting(pinned), width: 100},
		"rollback-nothing":   {command: "rollback qwen", objects: awaiting(), width: 80, code: exitState},
		"rollback-worthless": {command: "rollback qwen --to poor", objects: append(awaiting(), planned("poor", secondDigest, time.Minute, worthless)), width: 100, code: exitState},

		"approve-theirs":           {command: "approve qwen theirs", objects: append(awaiting(), planned("theirs", secondDigest, time.Minute, theirs)), width: 100, code: exitState},
		"approve-other-ranks":      {command: "approve qwen wide", objects: append(awaiting(), planned("wide", secondDigest, time.Minute, wide)), width: 100, code: exitState},
		"approve-failed":           {command: "approve qwen marked", objects: append(awaiting(), marked(failed, own)), width: 100, code: exitState},
		"approve-changed":          {command: "approve qwen marked", objects: append(awaiting(wanted), marked(changed, own)), width: 100, code: exitState},
		"approve-changed-before":   {command: "approve qwen marked", objects: append(awaiting(), marked(changed, own)), width: 100},
		"approve-held":             {command: "approve qwen", objects: inCanary(held), width: 100, code: exitState},
		"rollback-to-held":         {command: "rollback qwen --to 602077", objects: inCanary(held), width: 100, code: exitState},
		"rollback-to-failed":       {command: "rollback qwen --to marked", objects: append(awaiting(), marked(failed, own)), width: 100, code: exitState},
		"rollback-to-their-failed": {command: "rollback qwen --to marked", objects: append(awaiting(), marked(failed, theirs)), width: 100},
		"rollback-to-proven":       {command: "rollback qwen --to marked", objects: append(awaiting(serving), marked(failed, own)), width: 100},

		"approve-paused":              {command: "approve qwen", objects: awaiting(paused), width: 100},
		"rollback-to-paused":          {command: "rollback qwen --to qwen-c65ee2b4", objects: awaiting(paused), width: 100},
		"rollback-to-tables-paused":   {command: "rollback qwen --to 602077", objects: newTables(paused), width: 100},
		"rollback-to-advisory":        {command: "rollback qwen --to qwen-c65ee2b4", objects: awaiting(advisory), width: 100, code: exitState},
		"rollback-to-tables-advisory": {command: "rollback qwen --to 602077", objects: newTables(advisory), width: 100, code: exitState},
		"rollback-to-in-service":      {command: "rollback qwen --to qwen-c65ee2b4", objects: inCanary(advisory, paused), width: 100},
		"rollback-to-tables-tokens":   {command: "rollback qwen --to tokens", objects: ofTokens(unshuffled, ofCounts), width: 100, code: exitState},
		"rollback-to-other-tokens":    {command: "rollback qwen --to tokens", objects: ofTokens(), width: 100, code: exitState},
		"rollback-to-tokens":          {command: "rollback qwen --to tokens", objects: ofTokens(unshuffled), width: 100},

		"pause":           {command: "pause qwen", objects: awaiting(), width: 80},
		"pause-argo":      {command: "pause qwen", objects: awaiting(underArgo), width: 60, color: true},
		"pause-argo-json": {command: "pause qwen -o json", objects: awaiting(underArgo)},
		"pause-again":     {command: "pause qwen", objects: awaiting(paused, underArgo), width: 80},
		"resume":          {command: "resume qwen", objects: awaiting(paused), width: 80},
	}
}

func errorGoldens() map[string]golden {
	twins := append(awaiting(), planned("twin", firstDigest, time.Minute))
	return map[string]golden{
		"error-not-found":      {command: "status qwn", objects: awaiting(), width: 80, code: exitNotFound},
		"error-none":           {command: "pause qwen", width: 80, code: exitNotFound},
		"error-plan-not-found": {command: "approve qwen 0000000", objects: awaiting(), width: 80, code: exitNotFound},
		"error-ambiguous":      {command: "approve qwen b509acce", objects: twins, width: 80, code: exitUsage},
		"error-forbidden":      {command: "status qwen", getError: errRefused, width: 80, code: exitError},
		"error-not-installed":  {command: "status", getError: errNoKind, width: 80, code: exitNotFound},
		"error-no-path":        {command: "status qwen", getError: errNoPath, width: 80, code: exitNotFound},
		"error-unreachable":    {command: "status", getError: errUnreachable, width: 80, color: true, code: exitError},
		"error-output":         {command: "status -o yaml", width: 80, code: exitUsage},
		"error-flag":           {command: "status --wide", width: 80, code: exitUsage},
		"error-command":        {command: "promote qwen", width: 80, code: exitUsage},
		"error-arguments":      {command: "approve", width: 80, code: exitUsage},
		"error-dry-run":        {command: "pause qwen --dry-run=client", objects: awaiting(), width: 80, code: exitUsage},
		"error-empty-to":       {command: "rollback qwen --to=", objects: inCanary(), width: 80, code: exitUsage},
		"error-empty-current":  {command: "report qwen-5d0d71aa --current= --out page.html", objects: paying(), width: 80, code: exitUsage},
		"error-no-folder":      {command: "report qwen-5d0d71aa --out none/page.html", objects: paying(), width: 80, code: exitUsage},
		"error-exclusive":      {command: "rollback qwen --to x --unpin", objects: awaiting(), width: 80, code: exitUsage},
		"error-all-and-name":   {command: "status qwen -A", objects: awaiting(), width: 80, code: exitUsage},
	}
}
