package walk

import (
	"context"
	"fmt"
	"math/rand/v2"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
)

// situation is a spec in which some fields have their effect.
type situation struct {
	name, spec string
	// oneWay is why a change that is taken back leaves something on purpose; empty where it does not. Where it does, each value is
	// tried on an object of its own: what the one before it left would seem to follow from it.
	oneWay string
	// prepare makes what the spec names in a namespace, and may fill in what is known only then; nil for nothing.
	prepare func(ctx context.Context, namespace string, s spec) error
}

const deployed = `
model: {volume: {hostPath: {path: /srv/model}}}
engine: {image: "engine:1"}
parallelism: {expertParallelSize: 4}
routing: {replicas: 1}
`

// serving rolls plans out without comparing them.
const serving = deployed + `
rollout: {soakSeconds: 0}
`

// situations are tried in this order, until one of them shows the effect of a field.
var situations = []situation{
	{name: "a model that is profiled and planned", spec: serving + `
replicas: 2
profiling: {dataset: {configMap: {name: texts}}, target: Dedicated}
`},
	{name: "a plan that waits for room", spec: serving + `
replicas: 1
profiling: {dataset: {persistentVolumeClaim: {claimName: texts, path: dataset.jsonl}}, target: Serving}
`, oneWay: "a plan that found room once stays in service"},
	{name: "reshuffled weights in a cache", spec: serving + `
replicas: 2
profiling: {dataset: {path: /models/dataset.jsonl}, target: Dedicated}
placement: {realization: ReshuffledWeights, cache: {volume: {hostPath: {path: /srv/cache}}, sizeBytes: 1000000}}
`},
	{name: "a profile by its name", spec: serving + `
replicas: 1
profiling: {profileRef: {name: shared}}
`},
	{name: "tokens that the engine shuffles", spec: `
model: {volume: {hostPath: {path: /srv/model}}}
engine: {image: "engine:1", args: ["--moe-a2a-backend", "deepep"]}
parallelism: {expertParallelSize: 4, attention: TensorParallel}
placement: {tokenShuffle: Enabled}
routing: {replicas: 1}
rollout: {soakSeconds: 0}
replicas: 2
profiling: {dataset: {configMap: {name: texts}}, target: Dedicated}
`},
	{name: "micro-batches of vLLM", spec: `
model: {volume: {hostPath: {path: /srv/model}}}
engine: {type: VLLM, image: "engine:1", args: ["--all2all-backend", "deepep_low_latency"], overlap: {microBatches: 2}}
parallelism: {expertParallelSize: 4}
routing: {replicas: 1}
`},
	{name: "micro-batches of SGLang", spec: `
model: {volume: {hostPath: {path: /srv/model}}}
engine: {image: "engine:1", args: ["--moe-a2a-backend", "deepep"], overlap: {microBatches: 2, communicationSMs: 20}}
parallelism: {expertParallelSize: 4}
routing: {replicas: 1}
`},
	{name: "machines of the user's own", spec: serving + `
replicas: 2
profiling: {dataset: {configMap: {name: texts}}, target: Dedicated}
placement: {hardware: {configMap: {name: machines}}}
`},
	{name: "copies of experts", spec: serving + `
replicas: 2
profiling: {dataset: {configMap: {name: texts}}, target: Dedicated}
placement: {redundantExperts: 4}
`},
	{name: "copies of experts from memory", spec: serving + `
replicas: 2
profiling: {dataset: {configMap: {name: texts}}, target: Dedicated}
placement: {redundantExperts: Auto, redundantMemoryBytes: 2Gi}
`},
	{name: "a canary that soaks", spec: deployed + `
replicas: 3
rollout: {soakSeconds: 86400}
profiling: {dataset: {configMap: {name: texts}}, target: Dedicated}
`, oneWay: "a plan that is promoted stays in service"},
	{name: "a rate that Prometheus tells", spec: serving + `
replicas: 2
profiling: {dataset: {configMap: {name: texts}}, target: Dedicated}
drift: {source: Prometheus, prometheus: {address: "http://127.0.0.1:9", query: lar}}
`, prepare: nameServer},
}

// shownElsewhere are fields, by kind and path, whose effect no spec alone could show here, with the directory and the name of the test
// that shows it.
var shownElsewhere = map[string]string{
	// The small model has no groups of experts, and its plans are found at once.
	"PlacementPlan spec.realization":              "controllers/placementplan TestReshuffledWeightsKeepGroups",
	"PlacementPlan spec.solver.timeBudgetSeconds": "solver TestTimeBudgetCutsOff",
	// No profile takes it.
	"AffinityProfile spec.parallelism.podsPerReplica": "test/api TestProfileTakesNoPodsPerReplica",
	// They matter once traffic has drifted: what the agent's routers tell is older than any window.
	"MoEDeployment spec.drift.thresholdPercent":     "controllers/moedeployment/locality TestAssessDrift",
	"MoEDeployment spec.drift.cooldownSeconds":      "controllers/moedeployment/locality TestAssessDrift",
	"MoEDeployment spec.drift.maxReplansPerDay":     "controllers/moedeployment/locality TestAssessDrift",
	"MoEDeployment spec.profiling.refresh":          "controllers/moedeployment/planner TestNextReplan",
	"MoEDeployment spec.rollout.minimumGainPercent": "controllers/moedeployment/planner TestReplanObjects",
	"MoEDeployment spec.rollout.batchTokens":        "controllers/moedeployment/planner TestReplanObjects",
	"PlacementPlan spec.observedBatchTokens":        "controllers/placementplan TestBatchSizes",
	// No plan is worse here than none.
	"MoEDeployment spec.rollout.rollback": "controllers/moedeployment TestCanaryIsDecided",
	// It needs another mode.
	"MoEDeployment spec.routing.gatewayNamespaces": "controllers/moedeployment/front TestNetworkPolicies",
	// It is refused without what is to be asked, and that is refused without it.
	"MoEDeployment spec.drift.source": "controllers/moedeployment TestAssessFromPrometheus",
}

// TestSpecs is one test, since all of it needs the same manager.
func TestSpecs(t *testing.T) {
	startManager(t)
	checkElsewhere(t)
	root := specSchema(t, "moedeployments")
	fields := fieldsOf(t, nil, root, reflect.TypeFor[semmoev1.MoEDeploymentSpec]())
	t.Logf("a MoEDeployment has %d fields", len(fields))
	t.Run("invalid values are refused", func(t *testing.T) { checkRefusals(t, root, fields) })
	t.Run("every field has an effect, and a way back", func(t *testing.T) { checkEffects(t, root, chosen(slices.Clone(fields))) })
	for _, k := range immutable {
		t.Run("every field of a new "+k.name+" has an effect", func(t *testing.T) {
			checkImmutable(t, k, chosen(fieldsOf(t, nil, specSchema(t, k.plural), k.spec)))
		})
	}
	t.Run("the end does not depend on the way", func(t *testing.T) { checkWalks(t, root, fields) })
	checkQuiet(t)
}

// checkRefusals tries every value that the schema forbids, in every field: the API server names the field.
func checkRefusals(t *testing.T, root schema, fields []field) {
	object, err := create(t.Context(), newNamespace(t), situations[0])
	if err != nil {
		t.Fatal(err)
	}
	base, tried := specOf(situations[0].spec), 0
	for _, f := range fields {
		for _, value := range f.invalid() {
			tried++
			_, err := replace(t.Context(), object, base.with(root, f.path, value), client.DryRunAll)
			if !refused(err) {
				t.Errorf("%v = %.60v is accepted (%v)", f, value, err)
			} else if !strings.Contains(err.Error(), f.path[len(f.path)-1]) {
				t.Errorf("%v = %.60v is refused without its name: %v", f, value, err)
			}
		}
	}
	t.Logf("%d invalid values refused", tried)
	if tried < 3*len(fields) {
		t.Errorf("only %d invalid values were tried", tried)
	}
}

// refused tells that the API server finds fault with an object, not with the request.
func refused(err error) bool { return apierrors.IsInvalid(err) || apierrors.IsBadRequest(err) }

// create creates a MoEDeployment in a situation.
func create(ctx context.Context, namespace string, in situation) (*unstructured.Unstructured, error) {
	s := specOf(in.spec)
	if err := in.prepared(ctx, namespace, s); err != nil {
		return nil, fmt.Errorf("%s: %w", in.name, err)
	}
	object := objectNamed("MoEDeployment", namespace, "m", s)
	if err := api.Create(ctx, object); err != nil {
		return nil, fmt.Errorf("%s: %w", in.name, err)
	}
	return object, nil
}

func (in situation) prepared(ctx context.Context, namespace string, s spec) error {
	if in.prepare == nil {
		return nil
	}
	return in.prepare(ctx, namespace, s)
}

// effectWorkers is how many MoEDeployments fields are tried on at the same time.
const effectWorkers = 6

// checkEffects changes every field alone, in one situation after the other, until something follows from it.
func checkEffects(t *testing.T, root schema, fields []field) {
	showEffects(t, "MoEDeployment", situations, fields, func(in situation, queue <-chan field, without func(field)) {
		if in.oneWay != "" {
			tryAlone(t, "MoEDeployment", in, root, queue, without)
		} else {
			tryFields(t, newNamespace(t), in, root, queue, without)
		}
	})
}

// fewFields is how many fields of a kind are tried, in the first situation, where not all are.
const fewFields = 3

// chosen are the fields that are tried: those that were asked for, all in full, a seeded few otherwise.
func chosen(fields []field) []field {
	if *only != "" {
		pattern := regexp.MustCompile(*only)
		return slices.DeleteFunc(fields, func(f field) bool { return !pattern.MatchString(f.String()) })
	}
	if *full {
		return fields
	}
	random := rand.New(rand.NewPCG(*seed, 0))
	var few []field
	for _, i := range random.Perm(len(fields))[:min(fewFields, len(fields))] {
		few = append(few, fields[i])
	}
	return few
}

// showEffects has workers try the fields of a kind in one situation after the other, and complains of those that have no effect in any.
func showEffects(t *testing.T, kind string, situations []situation, fields []field, try func(in situation, queue <-chan field, without func(field))) {
	t.Helper()
	fields = slices.DeleteFunc(fields, func(f field) bool { return shownElsewhere[kind+" "+f.String()] != "" })
	inPart := !*full && *only == ""
	if inPart {
		situations = situations[:1]
	}
	for _, in := range situations {
		begin, before := time.Now(), fields
		fields = withoutEffect(fields, func(queue <-chan field, without func(field)) { try(in, queue, without) })
		if t.Failed() {
			return // fields may be untried
		}
		acting := slices.DeleteFunc(slices.Clone(before), func(f field) bool {
			return slices.ContainsFunc(fields, func(left field) bool { return left.String() == f.String() })
		})
		t.Logf("%s: %d of %d fields have an effect, in %.1f s: %v", in.name, len(acting), len(before), time.Since(begin).Seconds(), acting)
	}
	if inPart {
		return // another situation may show what the first one does not
	}
	for _, f := range fields {
		t.Errorf("%s %v is accepted, and has no effect in any situation: let it act, or add the situation in which it does", kind, f)
	}
}

// withoutEffect returns the fields that had no effect, as the workers tell that take them from a queue.
func withoutEffect(fields []field, work func(queue <-chan field, without func(field))) []field {
	queue := make(chan field, len(fields))
	for _, f := range fields {
		queue <- f
	}
	close(queue)
	var mu sync.Mutex
	var left []field
	var workers sync.WaitGroup
	for range min(effectWorkers, len(fields)) {
		workers.Go(func() {
			work(queue, func(f field) {
				mu.Lock()
				defer mu.Unlock()
				left = append(left, f)
			})
		})
	}
	workers.Wait()
	return left
}

// tryFields takes fields from the queue, and tries them on a MoEDeployment of its own. Then it takes the spec back to where it began.
func tryFields(t *testing.T, namespace string, in situation, root schema, queue <-chan field, without func(field)) {
	object, err := create(t.Context(), namespace, in)
	if err != nil {
		t.Error(err)
		return
	}
	base, err := settled(t.Context(), object)
	if err != nil {
		t.Error(err)
		return
	}
	start := specOf(in.spec)
	if err := in.prepared(t.Context(), namespace, start); err != nil {
		t.Error(err)
		return
	}
	for f := range queue {
		acts, err := hasEffect(t.Context(), object, base, root, start, f)
		if err != nil {
			t.Errorf("%s: %v: %v", in.name, f, err)
			return
		}
		if !acts {
			without(f)
		}
	}
	back, err := replace(t.Context(), object, start)
	if err != nil {
		t.Error(err)
		return
	}
	end, err := settled(t.Context(), back)
	if err != nil {
		t.Error(err)
		return
	}
	if diff := otherEnd(base, end); diff != "" {
		t.Errorf("%s: back at the first spec, another state (-first +last):\n%s", in.name, diff)
	}
}

// maxCandidates bounds how many values of a field are tried in one situation.
const maxCandidates = 3

// hasEffect changes a field alone, to one value after the other, until something else follows than from the first spec.
func hasEffect(ctx context.Context, object *unstructured.Unstructured, base map[string]string, root schema, start spec, f field) (bool, error) {
	tried := 0
	for _, value := range f.candidates(start.get(f.path)) {
		if tried == maxCandidates {
			break
		}
		changed, err := replace(ctx, object, start.with(root, f.path, value))
		if refused(err) {
			continue
		}
		if err != nil {
			return false, err
		}
		tried++
		state, err := settled(ctx, changed)
		if err != nil {
			return false, fmt.Errorf("= %v: %w", value, err)
		}
		if err := faultNamed(ctx, changed); err != nil {
			return false, fmt.Errorf("= %v: %w", value, err)
		}
		if !cmp.Equal(effects(base), effects(state)) {
			return true, nil
		}
	}
	return false, nil
}

// faultNamed is an error where something needs a human, and no condition names the field that is at fault.
func faultNamed(ctx context.Context, object client.Object) error {
	live := &unstructured.Unstructured{}
	live.SetGroupVersionKind(object.GetObjectKind().GroupVersionKind())
	if err := api.Get(ctx, client.ObjectKeyFromObject(object), live); err != nil {
		return err
	}
	var told struct {
		Status struct {
			Conditions []metav1.Condition `json:"conditions"`
		} `json:"status"`
	}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(live.Object, &told); err != nil {
		return err
	}
	stalled := meta.FindStatusCondition(told.Status.Conditions, semmoev1.ConditionStalled)
	if stalled == nil || stalled.Status == metav1.ConditionTrue && !strings.Contains(stalled.Message, "spec.") {
		return fmt.Errorf("condition Stalled names no field: %+v", stalled)
	}
	return nil
}

// checkWalks takes specs at random through changes, valid and invalid, one before or after the other has had its effects; then to a
// fixed spec, where everything must be as if it had been so from the beginning.
func checkWalks(t *testing.T, root schema, fields []field) {
	last := situations[0]
	object, err := create(t.Context(), newNamespace(t), last)
	if err != nil {
		t.Fatal(err)
	}
	reference, err := settled(t.Context(), object)
	if err != nil {
		t.Fatal(err)
	}
	slots := make(chan struct{}, 4)
	var all sync.WaitGroup
	for i := range *walks {
		namespace := newNamespace(t)
		all.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			random := rand.New(rand.NewPCG(*seed, uint64(i)))
			path, end, err := walk(t, random, namespace, root, fields, last)
			if err != nil {
				t.Errorf("walk %d:%s\n%v", i, path, err)
			} else if diff := otherEnd(reference, end); diff != "" {
				t.Errorf("walk %d ends elsewhere than it would have without the way (-without +with):%s\n%s", i, path, diff)
			}
		})
	}
	all.Wait()
}

// walk walks, and returns the way in words, and the state at its end.
func walk(t *testing.T, random *rand.Rand, namespace string, root schema, fields []field, last situation) (string, map[string]string, error) {
	first := situations[random.IntN(len(situations))]
	at, way := specOf(first.spec), "\n  "+first.name
	if err := first.prepared(t.Context(), namespace, at); err != nil {
		return way, nil, err
	}
	object, err := create(t.Context(), namespace, first)
	if err != nil {
		return way, nil, err
	}
	for range *steps {
		f := fields[random.IntN(len(fields))]
		next, what := at.without(f.path), "removed"
		if values := f.candidates(at.get(f.path)); random.IntN(4) > 0 && len(values) > 0 {
			value := values[random.IntN(len(values))]
			next, what = at.with(root, f.path, value), fmt.Sprintf("= %.60v", value)
		}
		changed, err := replace(t.Context(), object, next)
		way += fmt.Sprintf("\n  %v %s", f, what)
		switch {
		case refused(err):
			way += ": refused"
			continue
		case err != nil:
			return way, nil, err
		}
		at = next
		if random.IntN(3) > 0 {
			continue // before anything follows from it
		}
		way += ", and what follows from it"
		if _, err := settled(t.Context(), changed); err != nil {
			return way, nil, err
		}
		if err := faultNamed(t.Context(), changed); err != nil {
			return way, nil, err
		}
	}
	object, err = replace(t.Context(), object, specOf(last.spec))
	if err != nil {
		return way, nil, err
	}
	end, err := settled(t.Context(), object)
	return way, end, err
}

// checkQuiet holds that no reconciliation has panicked, and that none goes on although nothing changes.
func checkQuiet(t *testing.T) {
	const during = 5 * time.Second
	before := counter(t, "controller_runtime_reconcile_total")
	<-time.After(during)
	again := counter(t, "controller_runtime_reconcile_total") - before
	var list semmoev1.MoEDeploymentList
	if err := seen.List(t.Context(), &list); err != nil {
		t.Fatal(err)
	}
	t.Logf("%.0f reconciliations in all; %.0f in %v at the end, of %d MoEDeployments", before, again, during, len(list.Items))
	if limit := float64(3 * len(list.Items)); again > limit {
		t.Errorf("%.0f reconciliations in %v although nothing changes, want at most %.0f", again, during, limit)
	}
	if panics := counter(t, "controller_runtime_reconcile_panics_total"); panics > 0 {
		t.Errorf("%.0f reconciliations panicked", panics)
	}
}
