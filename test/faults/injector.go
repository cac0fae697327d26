// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/go-logr/logr"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
)

var (
	errCrashed     = errors.New("the manager has crashed")
	errUnreachable = errors.New("the API server cannot be reached")
)

// timeoutError is the error of a request without an answer in time. The client cannot know whether the request was
// executed.
type timeoutError struct{}

func (timeoutError) Error() string   { return "timeout awaiting response headers" }
func (timeoutError) Timeout() bool   { return true }
func (timeoutError) Temporary() bool { return true }

// Injector forwards the requests of one manager to the API server. Its methods are safe for concurrent use.
type Injector struct {
	schedule   Schedule
	reconciles reconciles
	crashed    chan struct{}
	started    time.Time
	// dying serializes the writes of a manager that will crash, so that no write is executed after the last one.
	dying sync.Mutex

	mu       sync.Mutex
	requests uint64
	writes   int
	hits     map[fault]int
	refused  []string
	// versions holds the resource version that resulted from each write.
	versions []string
	// last describes the latest writes, at most keptWrites.
	last        []string
	dead        bool
	unreachable bool
	// expired holds the watches that get 410 Expired at the next request; see ResumeWatches.
	expired map[string]bool
	// listed holds the kinds that were already listed.
	listed map[string]bool
	// streams holds the open watches.
	streams map[*stream]bool
	// written is closed and replaced at each write.
	written chan struct{}
}

// New returns an Injector with the faults of a schedule.
func New(schedule Schedule) *Injector {
	return &Injector{
		schedule: schedule, crashed: make(chan struct{}), started: time.Now(), hits: map[fault]int{}, expired: map[string]bool{}, listed: map[string]bool{},
		streams: map[*stream]bool{}, written: make(chan struct{}),
	}
}

// Config returns a copy of a configuration. Clients with the copy send their requests through the Injector.
func (i *Injector) Config(base *rest.Config) *rest.Config {
	config := rest.CopyConfig(base)
	config.ContentType = runtime.ContentTypeJSON // the Injector parses resource versions and splits events by line
	config.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) { return i.roundTrip(next, r) })
	})
	return config
}

// Now returns the time of the manager's clock.
func (i *Injector) Now() time.Time { return i.schedule.clock(time.Now(), time.Since(i.started)) }

// Logger returns a logger for the manager that forwards to next and counts reconciliations and panics.
func (i *Injector) Logger(next logr.Logger) logr.Logger {
	return logr.New(&countingSink{next.GetSink(), &i.reconciles, false})
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// Crashed returns a channel that is closed when the manager has crashed.
func (i *Injector) Crashed() <-chan struct{} { return i.crashed }

// Writes returns the number of executed writes, including writes without an answer to the manager.
func (i *Injector) Writes() int {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.writes
}

// keptWrites is the maximum number of writes that LastWrites describes, keptBytes the maximum size of a body in it.
const keptWrites, keptBytes = 20, 4 << 10

// LastWrites describes the latest writes: the method, the path, the status and the beginning of the body.
func (i *Injector) LastWrites() []string {
	i.mu.Lock()
	defer i.mu.Unlock()
	return slices.Clone(i.last)
}

// Reconciliations returns the number of started reconciliations of a manager that logs to Logger.
func (i *Injector) Reconciliations() int { return int(i.reconciles.started.Load()) }

// Logged returns the latest entries at default verbosity that reconciliations logged to Logger.
func (i *Injector) Logged() []string {
	i.reconciles.mu.Lock()
	defer i.reconciles.mu.Unlock()
	return slices.Clone(i.reconciles.logged)
}

// Panics returns the number of reconciliations that panicked.
func (i *Injector) Panics() int { return int(i.reconciles.panics.Load()) }

// Refused returns the paths of PUT requests, which the Injector refuses because the operator must not send any.
func (i *Injector) Refused() []string {
	i.mu.Lock()
	defer i.mu.Unlock()
	return slices.Clone(i.refused)
}

// VersionBefore returns the resource version of the cluster before the manager's last k writes, or the version of its
// first write if it has sent fewer.
func (i *Injector) VersionBefore(k int) string {
	i.mu.Lock()
	defer i.mu.Unlock()
	if len(i.versions) == 0 {
		return ""
	}
	return i.versions[max(0, len(i.versions)-1-k)]
}

// String returns the counts of requests and faults, for the log of a test.
func (i *Injector) String() string {
	i.mu.Lock()
	defer i.mu.Unlock()
	text := fmt.Sprintf("%d reconciliations, %d requests, %d writes done", i.Reconciliations(), i.requests, i.writes)
	for _, hit := range slices.Sorted(maps.Keys(i.hits)) {
		text += fmt.Sprintf(", %d %s", i.hits[hit], hit)
	}
	return text
}

// InterruptWatches breaks all watches and fails all requests until ResumeWatches.
func (i *Injector) InterruptWatches() {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.unreachable = true
	for open := range i.streams {
		i.expired[open.path] = true
		open.end(io.EOF)
	}
}

// ResumeWatches ends InterruptWatches. The resource versions of the broken watches have expired, so that the manager must list again: it
// sees the current objects, but not the changes in between.
func (i *Injector) ResumeWatches() {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.unreachable = false
}

func (i *Injector) roundTrip(next http.RoundTripper, r *http.Request) (*http.Response, error) {
	purpose := purposeOf(r)
	hit, err := i.admit(r, purpose)
	if err != nil {
		return nil, err
	}
	switch hit {
	case throttled:
		response := answer(r, http.StatusTooManyRequests, metav1.StatusReasonTooManyRequests)
		response.Header.Set("Retry-After", "1")
		return response, nil
	case failed:
		if purpose == writing {
			return answer(r, http.StatusInternalServerError, metav1.StatusReasonInternalError), nil
		}
		return answer(r, http.StatusServiceUnavailable, metav1.StatusReasonServiceUnavailable), nil
	case conflict:
		return answer(r, http.StatusConflict, metav1.StatusReasonConflict), nil
	case timedOut:
		return nil, timeoutError{}
	}
	switch purpose {
	case writing:
		return i.write(next, r, hit == lost)
	case listing:
		return next.RoundTrip(i.age(r))
	case watching:
		return i.watch(next, r)
	}
	return next.RoundTrip(r)
}

// admit counts a request and selects its fault.
func (i *Injector) admit(r *http.Request, purpose purpose) (fault, error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	switch {
	case i.dead:
		return none, errCrashed
	case i.unreachable:
		return none, errUnreachable
	case purpose == exempt:
		return none, nil
	case r.Method == http.MethodPut:
		i.refused = append(i.refused, r.URL.Path)
		return none, fmt.Errorf("PUT %s: the operator never updates whole objects", r.URL.Path)
	}
	i.requests++
	hit := i.schedule.choose(i.requests, purpose == writing)
	if hit != none {
		i.hits[hit]++
	}
	return hit, nil
}

// write forwards a write. It crashes the manager at write number CrashAfter.
func (i *Injector) write(next http.RoundTripper, r *http.Request, lost bool) (*http.Response, error) {
	if i.schedule.CrashAfter > 0 {
		i.dying.Lock()
		defer i.dying.Unlock()
		select {
		case <-i.crashed:
			return nil, errCrashed
		default:
		}
	}
	response, err := next.RoundTrip(r)
	if err != nil {
		return nil, err
	}
	i.keep(r, response.StatusCode)
	body, err := io.ReadAll(response.Body)
	response.Body.Close()
	if err != nil {
		return nil, err
	}
	response.Body = io.NopCloser(bytes.NewReader(body))
	if i.done(response.StatusCode, body) {
		return nil, errCrashed
	}
	if lost {
		return nil, timeoutError{}
	}
	return response, nil
}

// keep records the description of a write for LastWrites.
func (i *Injector) keep(r *http.Request, status int) {
	var sent []byte
	if r.GetBody != nil { // set by client-go, which sends bodies from memory
		if body, err := r.GetBody(); err == nil {
			sent, _ = io.ReadAll(io.LimitReader(body, keptBytes))
		}
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	i.last = append(i.last, fmt.Sprintf("%s %s: %d: %s", r.Method, r.URL.Path, status, sent))
	i.last = i.last[max(0, len(i.last)-keptWrites):]
}

// done records a write that the API server has answered, and reports whether the manager crashes at this write.
func (i *Injector) done(status int, body []byte) (crashed bool) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.writes++
	if status < http.StatusMultipleChoices {
		var object metav1.PartialObjectMetadata
		if err := json.Unmarshal(body, &object); err == nil && object.ResourceVersion != "" {
			i.versions = append(i.versions, object.ResourceVersion)
		}
	}
	close(i.written)
	i.written = make(chan struct{})
	if i.writes == i.schedule.CrashAfter {
		i.dead = true
		close(i.crashed)
		return true
	}
	return false
}

// age sets the resource version of the first list of each kind to Schedule.ListVersion, if the list accepts any
// version, as for a cache. A list without a resource version gets the latest state, because readers that bypass the
// cache depend on it.
func (i *Injector) age(r *http.Request) *http.Request {
	i.mu.Lock()
	defer i.mu.Unlock()
	key := r.URL.Path + "?" + r.URL.Query().Get("labelSelector")
	if i.schedule.ListVersion == "" || i.listed[key] || r.URL.Query().Get("resourceVersion") != "0" {
		return r
	}
	i.listed[key] = true
	aged := r.Clone(r.Context())
	query := aged.URL.Query()
	query.Set("resourceVersion", i.schedule.ListVersion)
	query.Set("resourceVersionMatch", string(metav1.ResourceVersionMatchExact))
	aged.URL.RawQuery = query.Encode()
	return aged
}

// watch opens a watch and delays its events by the lag of the schedule.
func (i *Injector) watch(next http.RoundTripper, r *http.Request) (*http.Response, error) {
	key := r.URL.Path + "?" + r.URL.Query().Get("labelSelector")
	i.mu.Lock()
	expired := i.expired[key]
	delete(i.expired, key)
	i.mu.Unlock()
	if expired {
		return answer(r, http.StatusGone, metav1.StatusReasonExpired), nil
	}
	// The initial events of a streaming list cannot be aged, and cannot be distinguished from later events.
	if i.schedule.ListVersion != "" && r.URL.Query().Get("sendInitialEvents") == "true" {
		return answer(r, http.StatusUnprocessableEntity, metav1.StatusReasonInvalid), nil
	}
	response, err := next.RoundTrip(r)
	if err != nil || response.StatusCode != http.StatusOK {
		return response, err
	}
	opened := newStream(i, key, response.Body)
	i.mu.Lock()
	i.streams[opened] = true
	if i.unreachable { // InterruptWatches was called while this watch was being opened
		i.expired[key] = true
		opened.end(io.EOF)
	}
	i.mu.Unlock()
	response.Body = opened
	return response, nil
}

// answer returns an error response in the format of the API server.
func answer(r *http.Request, code int, reason metav1.StatusReason) *http.Response {
	status := metav1.Status{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}, Status: metav1.StatusFailure,
		Code: int32(code), Reason: reason, Message: "injected: " + strings.ToLower(http.StatusText(code)),
	}
	body, _ := json.Marshal(status) //nolint:errcheck // strings and a number
	return &http.Response{
		Status: http.StatusText(code), StatusCode: code, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, Request: r,
		Header: http.Header{"Content-Type": {runtime.ContentTypeJSON}}, Body: io.NopCloser(bytes.NewReader(body)), ContentLength: int64(len(body)),
	}
}
