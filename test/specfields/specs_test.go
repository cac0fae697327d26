// SPDX-License-Identifier: Apache-2.0

package specfields

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
	"github.com/semmoe/operator/test/tier"
)

// situation is a spec in which some fields have an effect.
type situation struct {
	name, spec string
	// oneWay is the reason why reverting a change does not restore the state, by design; empty if it does. If set, each
	// value is tried on a separate object, because leftovers of the previous value would look like an effect of the next
	// one.
	oneWay string
	// prepare creates the objects that the spec references, and may fill in values that are known only then. It may be
	// nil.
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
	{name: "a plan that waits for capacity", spec: serving + `
replicas: 1
profiling: {dataset: {persistentVolumeClaim: {claimName: texts, path: dataset.jsonl}}, target: Serving}
`, oneWay: "a plan that once had capacity stays in service"},
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
	{name: "a user-provided hardware profile", spec: serving + `
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
	{name: "a rate from Prometheus", spec: serving + `
replicas: 2
profiling: {dataset: {configMap: {name: texts}}, target: Dedicated}
drift: {source: Prometheus, prometheus: {address: "http://127.0.0.1:9", query: lar}}
`, prepare: nameServer},
}

// shownElsewhere maps fields, by kind and path, whose effect a spec alone cannot show in this package, to the directory
// and the name of the test that shows it.
var shownElsewhere = map[string]string{
	// The small model has no groups of experts, and its plans are solved immediately.
	"PlacementPlan spec.realization":              "controllers/placementplan TestReshuffledWeightsKeepGroups",
	"PlacementPlan spec.solver.timeBudgetSeconds": "solver TestTimeBudgetCutsOff",
	// AffinityProfile refuses this field, or all values of it but the default.
	"AffinityProfile spec.parallelism.podsPerReplica": "test/api TestProfilePodsPerReplicaRefused",
	"AffinityProfile spec.engine.overlap.mode":        "test/api TestProfileOverlapAutoRefused",
	// Its effect needs a plan whose models find a gain.
	"MoEDeployment spec.engine.overlap.mode": "controllers/moedeployment/planner TestOverlapComesWithThePlan",
	// A source needs a claim, or no volume. AffinityProfile refuses it.
	"MoEDeployment spec.model.source.huggingFace.repo":                  "controllers/moedeployment/download TestJob",
	"MoEDeployment spec.model.source.huggingFace.revision":              "controllers/moedeployment/download TestJob",
	"MoEDeployment spec.model.source.huggingFace.endpoint":              "controllers/moedeployment/download TestJob",
	"MoEDeployment spec.model.source.huggingFace.tokenSecretRef.name":   "controllers/moedeployment/download TestJob",
	"MoEDeployment spec.model.source.huggingFace.tokenSecretRef.key":    "controllers/moedeployment/download TestJob",
	"MoEDeployment spec.model.source.oci.image":                         "controllers/moedeployment/revisions TestImageVolume",
	"MoEDeployment spec.model.source.oci.pullPolicy":                    "controllers/moedeployment/revisions TestImageVolume",
	"AffinityProfile spec.model.source.huggingFace.repo":                "test/api TestProfileSourceRefused",
	"AffinityProfile spec.model.source.huggingFace.revision":            "test/api TestProfileSourceRefused",
	"AffinityProfile spec.model.source.huggingFace.endpoint":            "test/api TestProfileSourceRefused",
	"AffinityProfile spec.model.source.huggingFace.tokenSecretRef.name": "test/api TestProfileSourceRefused",
	"AffinityProfile spec.model.source.huggingFace.tokenSecretRef.key":  "test/api TestProfileSourceRefused",
	"AffinityProfile spec.model.source.oci.image":                       "test/api TestProfileSourceRefused",
	"AffinityProfile spec.model.source.oci.pullPolicy":                  "test/api TestProfileSourceRefused",
	// These fields have an effect after traffic has drifted. The reports of the agent's routers are older than any window.
	"MoEDeployment spec.drift.thresholdPercent":     "controllers/moedeployment/locality TestAssessDrift",
	"MoEDeployment spec.drift.cooldownSeconds":      "controllers/moedeployment/locality TestAssessDrift",
	"MoEDeployment spec.drift.maxReplansPerDay":     "controllers/moedeployment/locality TestAssessDrift",
	"MoEDeployment spec.profiling.refresh":          "controllers/moedeployment/planner TestNextReplan",
	"MoEDeployment spec.rollout.minimumGainPercent": "controllers/moedeployment/planner TestReplanObjects",
	"MoEDeployment spec.rollout.batchTokens":        "controllers/moedeployment/planner TestReplanObjects",
	"PlacementPlan spec.observedBatchTokens":        "controllers/placementplan TestBatchSizes",
	// No plan in these tests is worse than the default placement.
	"MoEDeployment spec.rollout.compare":  "controllers/moedeployment/decision TestChangeIsCompared",
	"MoEDeployment spec.rollout.rollback": "controllers/moedeployment TestCanaryIsDecided",
	// The small model has its own type, whose layout is known.
	"MoEDeployment spec.model.layoutAs":   "internal/model/reshuffle TestLayoutAs",
	"AffinityProfile spec.model.layoutAs": "internal/model/reshuffle TestLayoutAs",
	// The small profiles in these tests are recorded by the agent, whatever computes them.
	"MoEDeployment spec.profiling.backend":      "test/api TestTransformersBackend",
	"MoEDeployment spec.profiling.backendImage": "test/api TestTransformersBackend",
	"AffinityProfile spec.backend":              "controllers/affinityprofile TestRenderTransformers",
	"AffinityProfile spec.backendImage":         "controllers/affinityprofile TestRenderTransformers",
	// This field needs another routing mode.
	"MoEDeployment spec.routing.gatewayNamespaces": "controllers/moedeployment/front TestNetworkPolicies",
	// Secrets of request routers change their pods only, which the agent runs in any case.
	"MoEDeployment spec.routing.tls.secretName":         "controllers/moedeployment/front TestRouterTLSAndKeys",
	"MoEDeployment spec.routing.tls.clientCASecretName": "controllers/moedeployment/front TestRouterTLSAndKeys",
	"MoEDeployment spec.routing.auth.secretName":        "controllers/moedeployment/front TestRouterTLSAndKeys",
	"MoEDeployment spec.routing.auth.requestsPerMinute": "controllers/moedeployment/front TestRouterTLSAndKeys",
	"MoEDeployment spec.routing.auth.pendingLimit":      "controllers/moedeployment/front TestRouterTLSAndKeys",
	// The agent runs no engine that could serve TLS. A profile refuses it.
	"MoEDeployment spec.engine.tls.secretName":   "controllers/moedeployment/revisions TestRenderTLS",
	"AffinityProfile spec.engine.tls.secretName": "test/api TestEngineTLSRefused",
	// Settings of request routers change only arguments of their pods.
	"MoEDeployment spec.routing.queue.size":                         "controllers/moedeployment/front TestRouterResilience",
	"MoEDeployment spec.routing.queue.timeoutSeconds":               "controllers/moedeployment/front TestRouterResilience",
	"MoEDeployment spec.routing.queue.maxPriority":                  "controllers/moedeployment/front TestRouterResilience",
	"MoEDeployment spec.routing.circuitBreaker.consecutiveFailures": "controllers/moedeployment/front TestRouterResilience",
	"MoEDeployment spec.routing.circuitBreaker.failurePercent":      "controllers/moedeployment/front TestRouterResilience",
	"MoEDeployment spec.routing.circuitBreaker.ejectionSeconds":     "controllers/moedeployment/front TestRouterResilience",
	"MoEDeployment spec.routing.circuitBreaker.maxEjectionSeconds":  "controllers/moedeployment/front TestRouterResilience",
	"MoEDeployment spec.routing.circuitBreaker.halfOpenRequests":    "controllers/moedeployment/front TestRouterResilience",
	"MoEDeployment spec.routing.maxAttempts":                        "controllers/moedeployment/front TestRouterResilience",
	// This field and spec.drift.prometheus require each other, so that a change of one field is refused.
	"MoEDeployment spec.drift.source": "controllers/moedeployment TestAssessFromPrometheus",
}

// TestSpecFields is one test, because all its parts share a manager.
func TestSpecFields(t *testing.T) {
	startManager(t)
	checkElsewhere(t)
	root := specSchema(t, "moedeployments")
	fields := fieldsOf(t, nil, root, reflect.TypeFor[semmoev1.MoEDeploymentSpec]())
	t.Logf("a MoEDeployment has %d fields", len(fields))
	t.Run("invalid values are refused", func(t *testing.T) { checkRefusals(t, root, fields) })
	t.Run("every field has an effect that can be reverted", func(t *testing.T) {
		tier.Nightly(t)
		checkEffects(t, root, chosen(slices.Clone(fields)))
	})
	for _, k := range immutable {
		t.Run("every field of a new "+k.name+" has an effect", func(t *testing.T) {
			tier.Nightly(t)
			checkImmutable(t, k, chosen(fieldsOf(t, nil, specSchema(t, k.plural), k.spec)))
		})
	}
	t.Run("the final state does not depend on earlier specs", func(t *testing.T) {
		tier.Nightly(t)
		checkWalks(t, root, fields)
	})
	checkQuiet(t)
}

// checkRefusals tries invalid values in every field, and checks that the API server refuses them and names the field.
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
				t.Errorf("%v = %.60v is not refused as invalid (error %v)", f, value, err)
			} else if !strings.Contains(err.Error(), f.path[len(f.path)-1]) {
				t.Errorf("%v = %.60v is refused, but the message does not name the field: %v", f, value, err)
			}
		}
	}
	t.Logf("%d invalid values refused", tried)
	if tried < 3*len(fields) {
		t.Errorf("only %d invalid values were tried", tried)
	}
}

// refused reports whether the API server refused an object as invalid, as opposed to a failed request.
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

// effectWorkers is the number of objects that are tested concurrently.
const effectWorkers = 6

// checkEffects changes one field at a time, in one situation after the other, until the change has an effect.
func checkEffects(t *testing.T, root schema, fields []field) {
	showEffects(t, "MoEDeployment", situations, fields, func(in situation, queue <-chan field, without func(field)) {
		if in.oneWay != "" {
			tryAlone(t, "MoEDeployment", in, root, queue, without)
		} else {
			tryFields(t, newNamespace(t), in, root, queue, without)
		}
	})
}

// chosen returns the fields that match -fields.
func chosen(fields []field) []field {
	pattern := regexp.MustCompile(*only)
	return slices.DeleteFunc(fields, func(f field) bool { return !pattern.MatchString(f.String()) })
}

// showEffects tries the fields of a kind with concurrent workers in one situation after the other. A field without an
// effect in every situation fails the test.
func showEffects(t *testing.T, kind string, situations []situation, fields []field, try func(in situation, queue <-chan field, without func(field))) {
	t.Helper()
	fields = slices.DeleteFunc(fields, func(f field) bool { return shownElsewhere[kind+" "+f.String()] != "" })
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
	for _, f := range fields {
		t.Errorf("%s %v is accepted, but has no effect in any situation: implement the field, or add a situation in which it has an effect", kind, f)
	}
}

// withoutEffect runs workers that take fields from a queue, and returns the fields that the workers report as without
// effect.
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

// tryFields takes fields from the queue, and tries them on one separate MoEDeployment. Then it restores the first spec,
// and checks that the state is the first one.
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
		t.Errorf("%s: state differs after the first spec is restored (-first +last):\n%s", in.name, diff)
	}
}

// maxCandidates is the maximum number of values of a field that are tried in one situation.
const maxCandidates = 3

// hasEffect changes one field to one value after the other, and reports whether a value changes the resulting state.
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

// faultNamed returns an error if an object is stalled and the condition does not name the invalid field.
func faultNamed(ctx context.Context, object client.Object) error {
	live := &unstructured.Unstructured{}
	live.SetGroupVersionKind(object.GetObjectKind().GroupVersionKind())
	if err := api.Get(ctx, client.ObjectKeyFromObject(object), live); err != nil {
		return err
	}
	var reported struct {
		Status struct {
			Conditions []metav1.Condition `json:"conditions"`
		} `json:"status"`
	}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(live.Object, &reported); err != nil {
		return err
	}
	stalled := meta.FindStatusCondition(reported.Status.Conditions, semmoev1.ConditionStalled)
	if stalled == nil || stalled.Status == metav1.ConditionTrue && !strings.Contains(stalled.Message, "spec.") {
		return fmt.Errorf("condition Stalled is missing or names no field: %+v", stalled)
	}
	return nil
}

// checkWalks applies random valid and invalid changes to specs, some of them before the previous change has had its
// effects. Then it applies a fixed spec, and checks that the state equals that of an object which was created with the
// fixed spec.
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
	for i := range walks {
		namespace := newNamespace(t)
		all.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			random := rand.New(rand.NewPCG(1, uint64(i)))
			path, end, err := walk(t, random, namespace, root, fields, last)
			if err != nil {
				t.Errorf("walk %d:%s\n%v", i, path, err)
			} else if diff := otherEnd(reference, end); diff != "" {
				t.Errorf("walk %d: final state depends on earlier specs (-without +with):%s\n%s", i, path, diff)
			}
		})
	}
	all.Wait()
}

// walk applies random changes, and returns a description of the changes and the final state.
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
	for range steps {
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
			continue // the next change comes before the effects of this one
		}
		way += ", settled"
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

// checkQuiet checks that no reconciliation panicked, and that reconciliations end when nothing changes. On a busy
// machine, those of earlier changes may still run at first.
func checkQuiet(t *testing.T) {
	const during, windows = 5 * time.Second, 24
	var list semmoev1.MoEDeploymentList
	if err := seen.List(t.Context(), &list); err != nil {
		t.Fatal(err)
	}
	limit, again := float64(3*len(list.Items)), 0.0
	for range windows {
		before := counter(t, "controller_runtime_reconcile_total")
		<-time.After(during)
		if again = counter(t, "controller_runtime_reconcile_total") - before; again <= limit {
			break
		}
	}
	t.Logf("%.0f reconciliations in %v at the end, with %d MoEDeployments", again, during, len(list.Items))
	if again > limit {
		t.Errorf("%.0f reconciliations in each %v for %v without a change, want at most %.0f", again, during, windows*during, limit)
	}
	if panics := counter(t, "controller_runtime_reconcile_panics_total"); panics > 0 {
		t.Errorf("%.0f reconciliations panicked", panics)
	}
}
