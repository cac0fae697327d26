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
	errCrashed = errors.New("the manager has crashed")
	errBlind   = errors.New("the API server cannot be reached")
)

// timeoutError is what a client sees of a request that is not answered in time. Whether it was done, it cannot know.
type timeoutError struct{}

func (timeoutError) Error() string   { return "timeout awaiting response headers" }
func (timeoutError) Timeout() bool   { return true }
func (timeoutError) Temporary() bool { return true }

// Injector is the way from one manager to the API server. Its methods may be called concurrently.
type Injector struct {
	schedule   Schedule
	reconciles reconciles
	crashed    chan struct{}
	begun      time.Time
	// dying lets a write of a manager that will die finish before the next begins, so that none is done after the last.
	dying sync.Mutex

	mu       sync.Mutex
	requests uint64
	writes   int
	hits     map[fault]int
	refused  []string
	// versions holds the resource version that each write led to.
	versions []string
	// last describes the latest writes, at most keptWrites of them.
	last  []string
	dead  bool
	blind bool
	// expired are the watches that must be told, once, that they are too old; see See.
	expired map[string]bool
	// listed are the kinds that were listed once.
	listed map[string]bool
	// streams are the open watches.
	streams map[*stream]bool
	// written is closed with the next write.
	written chan struct{}
}

// New returns the way by which a schedule's faults come.
func New(schedule Schedule) *Injector {
	return &Injector{
		schedule: schedule, crashed: make(chan struct{}), begun: time.Now(), hits: map[fault]int{}, expired: map[string]bool{}, listed: map[string]bool{},
		streams: map[*stream]bool{}, written: make(chan struct{}),
	}
}

// Config is a copy of a configuration whose clients go this way.
func (i *Injector) Config(base *rest.Config) *rest.Config {
	config := rest.CopyConfig(base)
	config.ContentType = runtime.ContentTypeJSON // resource versions and the ends of events are read from it
	config.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) { return i.roundTrip(next, r) })
	})
	return config
}

// Now is the manager's clock.
func (i *Injector) Now() time.Time { return i.schedule.clock(time.Now(), time.Since(i.begun)) }

// Logger hands on to another logger what the manager logs, and counts its reconciliations.
func (i *Injector) Logger(next logr.Logger) logr.Logger {
	return logr.New(&countingSink{next.GetSink(), &i.reconciles})
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// Crashed is closed when the manager has died.
func (i *Injector) Crashed() <-chan struct{} { return i.crashed }

// Writes counts the writes that were done, whether or not the manager was told so.
func (i *Injector) Writes() int {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.writes
}

// keptWrites and keptBytes bound what is kept of writes for a test's message.
const keptWrites, keptBytes = 20, 4 << 10

// LastWrites describes the latest writes: the method, the path, the status and the beginning of what was sent.
func (i *Injector) LastWrites() []string {
	i.mu.Lock()
	defer i.mu.Unlock()
	return slices.Clone(i.last)
}

// Reconciliations counts those that have begun, of a manager that logs to Logger.
func (i *Injector) Reconciliations() int { return int(i.reconciles.begun.Load()) }

// Panics counts the reconciliations that panicked.
func (i *Injector) Panics() int { return int(i.reconciles.panics.Load()) }

// Refused are writes of a kind that the operator never does.
func (i *Injector) Refused() []string {
	i.mu.Lock()
	defer i.mu.Unlock()
	return slices.Clone(i.refused)
}

// VersionBefore is the resource version of the cluster before the manager's last k writes; of its first write where it has
// done fewer.
func (i *Injector) VersionBefore(k int) string {
	i.mu.Lock()
	defer i.mu.Unlock()
	if len(i.versions) == 0 {
		return ""
	}
	return i.versions[max(0, len(i.versions)-1-k)]
}

// String tells the figures, for a test's log.
func (i *Injector) String() string {
	i.mu.Lock()
	defer i.mu.Unlock()
	text := fmt.Sprintf("%d reconciliations, %d requests, %d writes done", i.Reconciliations(), i.requests, i.writes)
	for _, hit := range slices.Sorted(maps.Keys(i.hits)) {
		text += fmt.Sprintf(", %d %s", i.hits[hit], hit)
	}
	return text
}

// Blind breaks all watches, and lets nothing through any more, until See.
func (i *Injector) Blind() {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.blind = true
	for open := range i.streams {
		i.expired[open.path] = true
		open.end(io.EOF)
	}
}

// See ends Blind. Watches that broke are too old to go on from where they were: the manager sees what is there now, and
// nothing of what was there meanwhile.
func (i *Injector) See() {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.blind = false
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

// admit counts a request and chooses what is done to it.
func (i *Injector) admit(r *http.Request, purpose purpose) (fault, error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	switch {
	case i.dead:
		return none, errCrashed
	case i.blind:
		return none, errBlind
	case purpose == aside:
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

// write does a write, and lets the manager die with the last one granted.
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

// keep adds the description of a write.
func (i *Injector) keep(r *http.Request, status int) {
	var sent []byte
	if r.GetBody != nil { // client-go sends from memory
		if body, err := r.GetBody(); err == nil {
			sent, _ = io.ReadAll(io.LimitReader(body, keptBytes))
		}
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	i.last = append(i.last, fmt.Sprintf("%s %s: %d: %s", r.Method, r.URL.Path, status, sent))
	i.last = i.last[max(0, len(i.last)-keptWrites):]
}

// done records a write that the API server has answered, and tells whether the manager died with it.
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

// age makes the first list of each kind as old as the schedule wants it, where any version will do, as for a cache. A list without a version
// is answered by the latest: whoever reads past the cache relies on that.
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

// watch opens a watch, whose events come late where the schedule says so.
func (i *Injector) watch(next http.RoundTripper, r *http.Request) (*http.Response, error) {
	key := r.URL.Path + "?" + r.URL.Query().Get("labelSelector")
	i.mu.Lock()
	expired := i.expired[key]
	delete(i.expired, key)
	i.mu.Unlock()
	if expired {
		return answer(r, http.StatusGone, metav1.StatusReasonExpired), nil
	}
	// A first list within a watch cannot be aged, and an event of it cannot be told from a later one.
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
	if i.blind { // it was on its way when the others broke
		i.expired[key] = true
		opened.end(io.EOF)
	}
	i.mu.Unlock()
	response.Body = opened
	return response, nil
}

// answer is what an API server answers that refuses a request.
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
