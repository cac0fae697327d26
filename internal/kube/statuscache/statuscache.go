// SPDX-License-Identifier: Apache-2.0

// Package statuscache remembers the status that a controller last wrote for each object, because its cache lags behind.
//
// Invariant: the memory is optional. A later version in the cache always overrides it, and it expires. A controller
// that starts has no memory, and uses its cache. The memory prevents the controller from using an outdated status as
// the current one: it would not write a status that equals the outdated one, and would record a transition twice.
package statuscache

import (
	"encoding/json"
	"fmt"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// maxCacheLag is the maximum assumed lag of a cache. A longer apparent lag means that the cluster was restored from an
// older state.
const maxCacheLag = time.Minute

// Memory contains the last statuses, of type S, of the objects of one kind. The zero value is empty. Its methods may be
// called concurrently for different objects.
type Memory[S any] struct {
	last sync.Map // of client.ObjectKey to version[S]
}

// version is a status, with the resource version of the object that has it; "" if the write may have failed.
type version[S any] struct {
	status          S
	resourceVersion string
	at              time.Time
}

// Latest returns the latest known status of an object: the cached one, or the one written since.
func (m *Memory[S]) Latest(object client.Object, cached S) S {
	if last, ok := m.load(object); ok && newer(last.resourceVersion, object.GetResourceVersion()) && time.Since(last.at) < maxCacheLag {
		return last.status
	}
	return cached
}

// Write applies a status unless it equals the latest one, and reports whether it wrote. apply gets the status as JSON,
// and returns the resource version of the updated object.
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
	var written S // in the form that the cache will contain
	if err := json.Unmarshal(data, &written); err != nil {
		return false, err
	}
	m.last.Store(key, version[S]{status: written}) // if the response is lost, the write may or may not have succeeded
	resourceVersion, err := apply(data)
	if err != nil {
		return false, fmt.Errorf("failed to apply status: %w", err)
	}
	m.last.Store(key, version[S]{written, resourceVersion, time.Now()})
	return true, nil
}

// Foreign reports whether the object has a newer status that differs from the last written one: another client changed
// it.
func (m *Memory[S]) Foreign(object client.Object, status S) bool {
	last, ok := m.load(object)
	return ok && newer(object.GetResourceVersion(), last.resourceVersion) && !equality.Semantic.DeepEqual(status, last.status)
}

// Forget removes a deleted object from the memory.
func (m *Memory[S]) Forget(key client.ObjectKey) { m.last.Delete(key) }

func (m *Memory[S]) load(object client.Object) (version[S], bool) {
	last, ok := m.last.Load(client.ObjectKeyFromObject(object))
	if !ok {
		return version[S]{}, false
	}
	return last.(version[S]), true
}

// newer reports whether a resource version is later than another. The empty version is the earliest.
func newer(a, b string) bool {
	if a == "" || b == "" {
		return a != ""
	}
	order, err := resourceversion.CompareResourceVersion(a, b)
	return err == nil && order > 0
}
