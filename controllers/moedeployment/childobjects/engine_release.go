// SPDX-License-Identifier: Apache-2.0

package childobjects

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/internal/kube/podhealth"
	"github.com/semmoe/operator/internal/kube/writes"
)

const (
	// releaseTimeout is the time limit for a pod to report its release; releaseBytes is the maximum size of the
	// response that is read: SGLang's response contains the state of every rank.
	releaseTimeout = 3 * time.Second
	releaseBytes   = 4 << 20
	// releasePeriod is the retry interval for a pod that does not answer.
	releasePeriod = time.Minute
)

// Releases queries engines for their releases. The zero value is ready for use. It is safe for concurrent use.
type Releases struct {
	mu sync.Mutex
	// asked is the time of the last query of a pod that did not answer.
	asked map[types.UID]time.Time
}

// Ask queries a ready pod of each workload with an unknown release, and returns the writes that annotate the workloads
// with the results. It retries a pod that does not answer after releasePeriod. It returns the delay until the next
// query, or zero if every release is known or no pod is ready.
func (r *Releases) Ask(ctx context.Context, web *http.Client, workloads []*revisions.Workload, pods []*corev1.Pod, now time.Time) (writes []writes.Write, again time.Duration) {
	for _, w := range workloads {
		if w.Annotations[semmoev1.AnnotationEngineRelease] != "" {
			continue
		}
		at := slices.IndexFunc(pods, func(pod *corev1.Pod) bool { return w.Holds(pod) && podhealth.Ready(pod) && pod.Status.PodIP != "" })
		if at < 0 {
			continue // the readiness event requeues the object
		}
		adapter, err := registry.For(w.Template().Annotations[semmoev1.AnnotationEngine])
		if err != nil || adapter.ReleasePath == "" {
			continue
		}
		if !r.due(pods[at].UID, now) {
			again = releasePeriod
			continue
		}
		release, err := askRelease(ctx, web, pods[at], adapter.ReleasePath)
		if err != nil {
			again = releasePeriod
			continue
		}
		text := semmoev1.ReleaseUnknown
		if release.Known() {
			text = release.String()
		}
		writes = append(writes, revisions.ChangeWorkload{Workload: w, Annotations: map[string]string{semmoev1.AnnotationEngineRelease: text}})
	}
	return writes, again
}

// due reports whether to query a pod now, and records the query.
func (r *Releases) due(pod types.UID, now time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for uid, at := range r.asked {
		if now.Sub(at).Abs() >= releasePeriod {
			delete(r.asked, uid)
		}
	}
	if _, recent := r.asked[pod]; recent {
		return false
	}
	if r.asked == nil {
		r.asked = map[types.UID]time.Time{}
	}
	r.asked[pod] = now
	return true
}

// askRelease queries a pod for its release. A response without a release is not an error: the engine does not report
// one.
func askRelease(ctx context.Context, web *http.Client, pod *corev1.Pod, path string) (engine.Release, error) {
	ctx, cancel := context.WithTimeout(ctx, releaseTimeout)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, revisions.EngineURL(pod)+path, nil)
	if err != nil {
		return engine.Release{}, err
	}
	response, err := web.Do(request)
	if err != nil {
		return engine.Release{}, err
	}
	defer response.Body.Close()
	switch {
	case response.StatusCode == http.StatusNotFound:
		return engine.Release{}, nil
	case response.StatusCode != http.StatusOK:
		return engine.Release{}, fmt.Errorf("failed to read the release of pod %s: status %d", pod.Name, response.StatusCode)
	}
	answer, err := io.ReadAll(io.LimitReader(response.Body, releaseBytes))
	if err != nil {
		return engine.Release{}, err
	}
	return engine.ReadRelease(answer), nil
}
