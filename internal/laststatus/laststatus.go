// Package laststatus remembers which status a controller wrote last for each object, as the cache that it reads from lags behind.
//
// Invariant: memory is never needed, and never believed against a later version, nor for long. A controller that starts remembers
// nothing, and goes by its cache. What memory saves from is taking an old status for the present one: one that goes back to what the cache
// still holds would be taken for written, and a transition that was told would be told again.
package laststatus

import (
	"encoding/json"
	"fmt"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// believed is for how long a cache may be taken to lag behind. One that seems to for longer is of a cluster that was restored from an
// older state.
const believed = time.Minute

// Memory is of the statuses, of type S, of one kind of objects. The zero value remembers nothing. Its methods may be called concurrently
// for different objects.
type Memory[S any] struct {
	last sync.Map // of client.ObjectKey to version[S]
}

// version is a status and the resource version that the object had with it; "" where it may not have been written.
type version[S any] struct {
	status          S
	resourceVersion string
	at              time.Time
}

// Latest is the present status of an object as far as is known: the one that a cache holds, or that was written since.
func (m *Memory[S]) Latest(object client.Object, cached S) S {
	if last, ok := m.load(object); ok && newer(last.resourceVersion, object.GetResourceVersion()) && time.Since(last.at) < believed {
		return last.status
	}
	return cached
}

// Write applies a status unless it is the latest one, and reports whether it did. apply is given the status as JSON, and returns the
// resource version of the object that has it.
func (m *Memory[S]) Write(object client.Object, latest, wanted S, apply func(status []byte) (resourceVersion string, err error)) (bool, error) {
	key := client.ObjectKeyFromObject(object)
	last, known := m.load(object)
	unsure := known && last.resourceVersion == ""
	if !unsure && equality.Semantic.DeepEqual(latest, wanted) {
		if !known || newer(object.GetResourceVersion(), last.resourceVersion) {
			m.last.Store(key, version[S]{latest, object.GetResourceVersion(), time.Now()})
		}
		return false, nil
	}
	data, err := json.Marshal(wanted)
	if err != nil {
		return false, err
	}
	var written S // as the cache will hold it
	if err := json.Unmarshal(data, &written); err != nil {
		return false, err
	}
	m.last.Store(key, version[S]{status: written}) // an answer that is lost does not tell
	resourceVersion, err := apply(data)
	if err != nil {
		return false, fmt.Errorf("apply status: %w", err)
	}
	m.last.Store(key, version[S]{written, resourceVersion, time.Now()})
	return true, nil
}

// Foreign tells that the object's status is another than was written last, and later: somebody else has changed it.
func (m *Memory[S]) Foreign(object client.Object, status S) bool {
	last, ok := m.load(object)
	return ok && newer(object.GetResourceVersion(), last.resourceVersion) && !equality.Semantic.DeepEqual(status, last.status)
}

// Forget forgets an object that is gone.
func (m *Memory[S]) Forget(key client.ObjectKey) { m.last.Delete(key) }

func (m *Memory[S]) load(object client.Object) (version[S], bool) {
	last, ok := m.last.Load(client.ObjectKeyFromObject(object))
	if !ok {
		return version[S]{}, false
	}
	return last.(version[S]), true
}

// newer tells that a resource version is later than another; none is the earliest.
func newer(a, b string) bool {
	if a == "" || b == "" {
		return a != ""
	}
	order, err := resourceversion.CompareResourceVersion(a, b)
	return err == nil && order > 0
}
