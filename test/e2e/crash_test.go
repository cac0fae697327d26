package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
)

var errCrashed = errors.New("the manager has crashed")

// crashing counts the writes of a manager, and lets it die after one of them: that write is done, and everything the
// manager tries afterwards fails, until another takes its place.
type crashing struct {
	mu      sync.Mutex
	after   int // 0: never
	writes  int
	dead    bool
	crashed chan struct{}
}

func newCrashing(after int) *crashing { return &crashing{after: after, crashed: make(chan struct{})} }

func (c *crashing) count() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.writes
}

// write does a write unless the manager is dead, and kills it when it was the last one granted.
func (c *crashing) write(do func() error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.dead {
		return errCrashed
	}
	err := do()
	if c.writes++; c.writes == c.after {
		c.dead = true
		close(c.crashed)
		return errCrashed
	}
	return err
}

func (c *crashing) newClient(config *rest.Config, options client.Options) (client.Client, error) {
	inner, err := client.NewWithWatch(config, options)
	if err != nil {
		return nil, err
	}
	return interceptor.NewClient(inner, interceptor.Funcs{
		Create: func(ctx context.Context, w client.WithWatch, object client.Object, options ...client.CreateOption) error {
			return c.write(func() error { return w.Create(ctx, object, options...) })
		},
		Patch: func(ctx context.Context, w client.WithWatch, object client.Object, patch client.Patch, options ...client.PatchOption) error {
			return c.write(func() error { return w.Patch(ctx, object, patch, options...) })
		},
		Apply: func(ctx context.Context, w client.WithWatch, object runtime.ApplyConfiguration, options ...client.ApplyOption) error {
			return c.write(func() error { return w.Apply(ctx, object, options...) })
		},
		Delete: func(ctx context.Context, w client.WithWatch, object client.Object, options ...client.DeleteOption) error {
			return c.write(func() error { return w.Delete(ctx, object, options...) })
		},
		SubResourceApply: func(ctx context.Context, w client.Client, name string, object runtime.ApplyConfiguration, options ...client.SubResourceApplyOption) error {
			return c.write(func() error { return w.SubResource(name).Apply(ctx, object, options...) })
		},
		Update: func(context.Context, client.WithWatch, client.Object, ...client.UpdateOption) error {
			return errors.New("the operator never updates whole objects")
		},
	}), nil
}

// story is what crash points are enumerated over.
type story func(t *testing.T, namespace string)

// serving: into service, a change rolled out, scaled.
func serving(t *testing.T, namespace string) {
	moed := newDeployment(namespace, "tiny", func(m *semmoev1.MoEDeployment) { m.Spec.Replicas = ptr.To[int32](2) })
	create(t, moed)
	waitComplete(t, moed)
	update(t, moed, func(m *semmoev1.MoEDeployment) { m.Spec.Engine.Env = []corev1.EnvVar{{Name: "CHANGED", Value: "yes"}} })
	eventually(t, patience, "the change is rolled out", func() error {
		if workloads := listWorkloads(t, moed); len(workloads) != 1 || len(workloads[0].Spec.Template.Spec.Containers[0].Env) != 2 {
			return fmt.Errorf("%d workloads", len(workloads))
		}
		return complete(get(t, moed))
	})
	update(t, moed, func(m *semmoev1.MoEDeployment) { m.Spec.Replicas = ptr.To[int32](1) })
	eventually(t, patience, "scaled down", func() error {
		if pods := listEnginePods(t, moed); len(pods) != 1 {
			return fmt.Errorf("%d pods", len(pods))
		}
		return complete(get(t, moed))
	})
}

// planning: profiled through the running deployment, planned, and rolled out.
func planning(t *testing.T, namespace string) {
	create(t, dataset(t, namespace, 4))
	moed := profiledDeployment(namespace)
	create(t, moed)
	waitPlanned(t, moed)
}

// switching: through all modes of routing and back.
func switching(t *testing.T, namespace string) {
	moed := newDeployment(namespace, "tiny")
	create(t, moed)
	waitComplete(t, moed)
	mode := func(mode semmoev1.RoutingMode) {
		update(t, moed, func(m *semmoev1.MoEDeployment) { m.Spec.Routing.Mode = mode })
	}
	mode(semmoev1.RoutingModeEndpointPicker)
	eventually(t, patience, "there is an InferencePool", func() error {
		_, err := getPool(t.Context(), moed)
		return err
	})
	mode(semmoev1.RoutingModeNone)
	eventually(t, patience, "the router is gone", func() error { return absent(t.Context(), &appsv1.Deployment{}, namespace, "tiny-router") })
	mode(semmoev1.RoutingModeRouter)
	eventually(t, patience, "the Service leads to the router, and what a Gateway needs is gone", func() error { return proxied(t.Context(), moed) })
	waitComplete(t, moed)
}

// The manager is killed after its k-th write, and another started: whatever k, the end is the same as without a crash,
// and the model is inspected once.
func TestCrashAfterAnyWrite(t *testing.T) {
	t.Parallel()
	enumerate(t, serving, 4)
}

// The same for a profile and a plan: no crash costs a second profiling Job.
func TestCrashWhilePlanning(t *testing.T) {
	t.Parallel()
	enumerate(t, planning, 3)
}

// The same for changes of the mode of routing: nothing that another mode made is left.
func TestCrashWhileSwitching(t *testing.T) {
	t.Parallel()
	installInferencePools(t)
	enumerate(t, switching, 3)
}

// enumerate runs the story once without a crash, then with a crash after each of its writes, or after a seeded few.
func enumerate(t *testing.T, tell story, few int) {
	namespace := newNamespace(t)
	clean := newCrashing(0)
	stop := startManager(t, namespace, clean.newClient)
	tell(t, namespace)
	want := endState(t, namespace)
	stop()
	writes := clean.count()
	t.Logf("the clean run has %d writes", writes)
	if writes < 20 {
		t.Errorf("only %d writes: the story is too short to be worth crashing", writes)
	}

	points := make([]int, writes)
	for i := range points {
		points[i] = i + 1
	}
	if !*full {
		random := rand.New(rand.NewPCG(1, 2))
		random.Shuffle(len(points), func(i, j int) { points[i], points[j] = points[j], points[i] })
		points = points[:few]
		slices.Sort(points)
	}
	slots := make(chan struct{}, 4)
	var runs sync.WaitGroup
	for _, point := range points {
		runs.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			t.Run(fmt.Sprintf("write %d", point), func(t *testing.T) { crashAt(t, tell, point, want) })
		})
	}
	runs.Wait()
}

func crashAt(t *testing.T, tell story, point int, want map[string]string) {
	namespace := newNamespace(t)
	c := newCrashing(point)
	stop := startManager(t, namespace, c.newClient)
	done := make(chan struct{})
	var successor sync.WaitGroup
	successor.Go(func() {
		select {
		case <-c.crashed:
			stop()
			startManager(t, namespace, nil)
		case <-done: // this run needed fewer writes than the clean one
		}
	})
	tell(t, namespace)
	close(done)
	successor.Wait()
	compare(t, want, endState(t, namespace))
	// The node has room for only so many pods.
	if err := api.DeleteAllOf(t.Context(), &semmoev1.MoEDeployment{}, client.InNamespace(namespace), client.PropagationPolicy(metav1.DeletePropagationBackground)); err != nil {
		t.Error(err)
	}
}

// endState is what is left of a namespace's objects when everything that differs between two runs is taken away: by
// kind and name, labels, annotations and spec. Pods and the times and addresses that the cluster gives are left out.
func endState(t *testing.T, namespace string) map[string]string {
	t.Helper()
	state := map[string]string{}
	for _, list := range kinds() {
		if _, pods := list.(*corev1.PodList); pods {
			continue
		}
		if err := api.List(t.Context(), list, client.InNamespace(namespace)); err != nil {
			t.Fatal(err)
		}
		for _, object := range objects(list) {
			state[kindOf(object)+" "+object.GetName()] = essence(t, object, namespace)
		}
	}
	var jobs batchv1.JobList
	if err := api.List(t.Context(), &jobs, client.InNamespace(namespace)); err != nil {
		t.Fatal(err)
	}
	state["jobs"] = fmt.Sprint(len(jobs.Items))
	return state
}

func essence(t *testing.T, object client.Object, namespace string) string {
	t.Helper()
	fields, err := runtime.DefaultUnstructuredConverter.ToUnstructured(object)
	if err != nil {
		t.Fatal(err)
	}
	spec, _ := fields["spec"].(map[string]any)
	for _, assigned := range []string{"clusterIP", "clusterIPs", "selector"} {
		delete(spec, assigned)
	}
	if template, ok := spec["template"].(map[string]any); ok { // the Job controller puts the Job's UID into labels
		delete(template, "metadata")
	}
	labels := object.GetLabels()
	for _, assigned := range []string{"batch.kubernetes.io/controller-uid", "controller-uid"} {
		delete(labels, assigned)
	}
	annotations := object.GetAnnotations()
	delete(annotations, "deployment.kubernetes.io/revision")
	data, err := json.MarshalIndent(map[string]any{"labels": labels, "annotations": annotations, "spec": spec}, "", " ")
	if err != nil {
		t.Fatal(err)
	}
	return strings.ReplaceAll(string(data), namespace, "NAMESPACE")
}

func objects(list client.ObjectList) []client.Object {
	var all []client.Object
	_ = meta.EachListItem(list, func(item runtime.Object) error { // the function returns no error
		all = append(all, item.(client.Object))
		return nil
	})
	return all
}

func compare(t *testing.T, want, got map[string]string) {
	t.Helper()
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("another end state (-want +got):\n%s", diff)
	}
}
