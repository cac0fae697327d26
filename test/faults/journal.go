package faults

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	toolswatch "k8s.io/client-go/tools/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"
)

// Journal records what is made and deleted in a namespace. An object that somebody deletes and makes again under the same
// name leaves no trace in an end state; here it does.
type Journal struct {
	mu      sync.Mutex
	added   map[string]int
	deleted map[string]int
	// troubles are the conditions that told of trouble at any time.
	troubles map[string]bool
	err      error
}

// given are the names of objects that every namespace has.
var given = []string{"default", "kube-root-ca.crt"}

// Follow records from now on, until the context ends.
func Follow(ctx context.Context, c client.WithWatch, namespace string, kinds []client.ObjectList) (*Journal, error) {
	j := newJournal()
	for _, kind := range kinds {
		list := kind.DeepCopyObject().(client.ObjectList)
		if err := c.List(ctx, list, client.InNamespace(namespace)); err != nil {
			return nil, err
		}
		watcher, err := toolswatch.NewRetryWatcherWithContext(ctx, list.GetResourceVersion(), watchFunc(func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			return c.Watch(ctx, list.DeepCopyObject().(client.ObjectList), client.InNamespace(namespace), &client.ListOptions{Raw: &options})
		}))
		if err != nil {
			return nil, err
		}
		go j.record(ctx, c, watcher)
	}
	return j, nil
}

func newJournal() *Journal {
	return &Journal{added: map[string]int{}, deleted: map[string]int{}, troubles: map[string]bool{}}
}

type watchFunc func(context.Context, metav1.ListOptions) (watch.Interface, error)

func (f watchFunc) WatchWithContext(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
	return f(ctx, options)
}

func (j *Journal) record(ctx context.Context, c client.Client, watcher watch.Interface) {
	for e := range watcher.ResultChan() {
		object, ok := e.Object.(client.Object)
		if !ok {
			j.fail(fmt.Errorf("a watch ended with %v", e.Object))
			continue
		}
		gvk, err := apiutil.GVKForObject(object, c.Scheme())
		if err != nil {
			j.fail(err)
			continue
		}
		if !slices.Contains(given, object.GetName()) {
			j.note(e.Type, gvk.Kind+" "+object.GetName())
		}
		if gvk.Group == ownGroup {
			j.look(gvk.Kind, object)
		}
	}
	if ctx.Err() == nil {
		j.fail(errors.New("a watch ended before its time"))
	}
}

func (j *Journal) note(what watch.EventType, object string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	switch what {
	case watch.Added:
		j.added[object]++
	case watch.Deleted:
		j.deleted[object]++
	}
}

// look keeps the conditions that tell of trouble.
func (j *Journal) look(kind string, object client.Object) {
	fields, err := runtime.DefaultUnstructuredConverter.ToUnstructured(object)
	if err != nil {
		j.fail(err)
		return
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	for condition, told := range conditions(fields) {
		if (condition == "Degraded" || condition == "Stalled") && strings.HasPrefix(told, "True") {
			j.troubles[fmt.Sprintf("%s %s: %s %s", kind, object.GetName(), condition, told)] = true
		}
	}
}

// Troubles are the Degraded and Stalled conditions that were true at any time, with their reasons.
func (j *Journal) Troubles() []string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return slices.Sorted(maps.Keys(j.troubles))
}

func (j *Journal) fail(err error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.err == nil {
		j.err = err
	}
}

// Counts is how often each object, by kind and name, was made and deleted. The error tells that the record has a gap.
func (j *Journal) Counts() (map[string]string, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	counts := map[string]string{}
	for object, n := range j.added {
		counts[object] = fmt.Sprintf("made %d times, deleted %d times", n, j.deleted[object])
	}
	for object, n := range j.deleted {
		if j.added[object] == 0 {
			counts[object] = fmt.Sprintf("made 0 times, deleted %d times", n)
		}
	}
	return counts, j.err
}

// Made counts the objects whose kind and name satisfy the function, each as often as it was made.
func (j *Journal) Made(which func(object string) bool) int {
	j.mu.Lock()
	defer j.mu.Unlock()
	total := 0
	for object, n := range j.added {
		if which(object) {
			total += n
		}
	}
	return total
}
