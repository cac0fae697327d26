// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	toolswatch "k8s.io/client-go/tools/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"
)

// Journal records creations and deletions of objects in a namespace. Unlike an end state, it shows that an object was
// deleted and created again with the same name.
type Journal struct {
	mu      sync.Mutex
	added   map[string]int
	deleted map[string]int
	// problems holds the conditions that reported a problem at any time.
	problems map[string]bool
	err      error
}

// defaultObjects lists the objects that exist in every namespace.
var defaultObjects = []string{"ServiceAccount default", "ConfigMap kube-root-ca.crt"}

// Record starts a Journal, which records until the context ends.
func Record(ctx context.Context, c client.WithWatch, namespace string, kinds []client.ObjectList) (*Journal, error) {
	j := newJournal()
	for _, kind := range kinds {
		f := &follower{journal: j, client: c, namespace: namespace, kind: kind, known: map[types.UID]string{}}
		version, err := f.list(ctx, func(watch.EventType, string) {})
		if err != nil {
			return nil, err
		}
		go f.follow(ctx, version)
	}
	return j, nil
}

func newJournal() *Journal {
	return &Journal{added: map[string]int{}, deleted: map[string]int{}, problems: map[string]bool{}}
}

// follower records the objects of one kind.
type follower struct {
	journal   *Journal
	client    client.WithWatch
	namespace string
	kind      client.ObjectList
	known     map[types.UID]string // existing objects: names by UID
}

// follow records the events of the watch. A restarted API server may not know the resource version of the watch. In
// that case follow lists the objects and compares them with the known ones, so that it only misses objects that were
// created and deleted in between.
func (f *follower) follow(ctx context.Context, version string) {
	for ctx.Err() == nil {
		watcher, err := toolswatch.NewRetryWatcherWithContext(ctx, version, watchFunc(func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			return f.client.Watch(ctx, f.kind.DeepCopyObject().(client.ObjectList), client.InNamespace(f.namespace), &client.ListOptions{Raw: &options})
		}))
		if err != nil {
			f.journal.fail(err)
			return
		}
		for e := range watcher.ResultChan() {
			if object, ok := e.Object.(client.Object); ok {
				f.handle(e.Type, object)
			}
		}
		for ctx.Err() == nil {
			if version, err = f.list(ctx, f.journal.note); err == nil {
				break
			}
		}
	}
}

// list calls notify for each object that was created or deleted since the last event or list, and returns the resource
// version of the list.
func (f *follower) list(ctx context.Context, notify func(watch.EventType, string)) (string, error) {
	list := f.kind.DeepCopyObject().(client.ObjectList)
	ctx, cancel := context.WithTimeout(ctx, listTime)
	defer cancel()
	if err := f.client.List(ctx, list, client.InNamespace(f.namespace)); err != nil {
		return "", err
	}
	before := f.known
	f.known = map[types.UID]string{}
	err := meta.EachListItem(list, func(item runtime.Object) error {
		object := item.(client.Object)
		name, err := f.name(object)
		if f.known[object.GetUID()] = name; before[object.GetUID()] == "" {
			notify(watch.Added, name)
		}
		return err
	})
	for uid, name := range before {
		if f.known[uid] == "" {
			notify(watch.Deleted, name)
		}
	}
	return list.GetResourceVersion(), err
}

// listTime is the timeout of a list. A stopped API server would never answer.
const listTime = 5 * time.Second

// name returns an object's kind and name.
func (f *follower) name(object client.Object) (string, error) {
	gvk, err := apiutil.GVKForObject(object, f.client.Scheme())
	return gvk.Kind + " " + object.GetName(), err
}

// handle records an event.
func (f *follower) handle(what watch.EventType, object client.Object) {
	name, err := f.name(object)
	if err != nil {
		f.journal.fail(err)
		return
	}
	if what == watch.Deleted {
		delete(f.known, object.GetUID())
	} else {
		f.known[object.GetUID()] = name
	}
	f.journal.note(what, name)
	f.journal.recordProblems(name, object)
}

type watchFunc func(context.Context, metav1.ListOptions) (watch.Interface, error)

func (f watchFunc) WatchWithContext(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
	return f(ctx, options)
}

// note counts the creation or deletion of an object. It ignores objects that exist in every namespace.
func (j *Journal) note(what watch.EventType, object string) {
	if slices.Contains(defaultObjects, object) {
		return
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	switch what {
	case watch.Added:
		j.added[object]++
	case watch.Deleted:
		j.deleted[object]++
	}
}

// recordProblems records Degraded and Stalled conditions with status True.
func (j *Journal) recordProblems(name string, object client.Object) {
	fields, err := runtime.DefaultUnstructuredConverter.ToUnstructured(object)
	if err != nil {
		j.fail(err)
		return
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	for condition, state := range conditions(fields) {
		if (condition == "Degraded" || condition == "Stalled") && strings.HasPrefix(state, "True") {
			j.problems[fmt.Sprintf("%s: %s %s", name, condition, state)] = true
		}
	}
}

// Problems returns the Degraded and Stalled conditions that were True at any time, with their reasons.
func (j *Journal) Problems() []string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return slices.Sorted(maps.Keys(j.problems))
}

func (j *Journal) fail(err error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.err == nil {
		j.err = err
	}
}

// Counts returns how often each object, by kind and name, was created and deleted. It returns an error if the record
// has a gap.
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

// Created returns the number of creations of objects for which the function returns true. The function gets kind and name.
func (j *Journal) Created(which func(object string) bool) int {
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
