// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/client-go/rest"
)

func TestPurposes(t *testing.T) {
	for request, want := range map[string]purpose{
		"GET /api":                                          exempt,
		"GET /api/v1":                                       exempt,
		"GET /apis/apps/v1":                                 exempt,
		"GET /version":                                      exempt,
		"GET /api/v1/pods":                                  listing,
		"GET /api/v1/namespaces":                            listing,
		"GET /api/v1/namespaces/one":                        reading,
		"GET /api/v1/namespaces/one/pods":                   listing,
		"GET /api/v1/namespaces/one/pods/p":                 reading,
		"GET /api/v1/pods?watch=true":                       watching,
		"GET /apis/apps/v1/statefulsets":                    listing,
		"POST /api/v1/namespaces/one/pods":                  writing,
		"DELETE /api/v1/namespaces/one":                     writing,
		"POST /api/v1/namespaces/one/events":                exempt,
		"PATCH /apis/apps/v1/namespaces/one/statefulsets/s": writing,
		"PATCH /apis/semmoe.io/v1/namespaces/o/moedeployments/m/status": writing,
		"PUT /apis/coordination.k8s.io/v1/namespaces/one/leases/l":      exempt,
		"GET /apis/apps/v1/namespaces/one/statefulsets?watch=true":      watching,
		"GET /apis/apps/v1/namespaces/one/statefulsets/s/scale":         reading,
	} {
		method, url, _ := strings.Cut(request, " ")
		if got := purposeOf(httptest.NewRequest(method, url, nil)); got != want {
			t.Errorf("%s is %d, want %d", request, got, want)
		}
	}
}

// TestChoices checks that faults have the configured shares, and that reads get no faults that are only for writes.
func TestChoices(t *testing.T) {
	schedule := Schedule{Seed: 7, Conflicts: 30, Throttled: 5, Failed: 10, TimedOut: 5, Lost: 20}
	const n = 20000
	for _, write := range []bool{false, true} {
		hits := map[fault]int{}
		for i := range uint64(n) {
			chosen := schedule.choose(i, write)
			hits[chosen]++
			if again := schedule.choose(i, write); again != chosen {
				t.Fatalf("request %d: fault %q, then %q with the same seed", i, chosen, again)
			}
		}
		for f, percent := range map[fault]int{throttled: 5, failed: 10, timedOut: 5, conflict: 30, lost: 20} {
			if !write && (f == conflict || f == lost) {
				percent = 0
			}
			// The tolerance is six standard deviations.
			if got := hits[f]; percent == 0 && got != 0 || got < n*percent/100-400 || got > n*percent/100+400 {
				t.Errorf("writes %t: %s hits %d of %d, want %d%%", write, f, got, n, percent)
			}
		}
	}
}

// server answers every write with the next resource version, records its requests, and sends events to watches.
type server struct {
	*httptest.Server
	mu       sync.Mutex
	requests []string
	events   chan string
}

func newServer(t *testing.T) *server {
	s := &server{events: make(chan string, 10)}
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		s.requests = append(s.requests, r.Method+" "+r.URL.String())
		version := len(s.requests)
		s.mu.Unlock()
		if r.URL.Query().Get("watch") != "true" {
			fmt.Fprintf(w, `{"metadata":{"resourceVersion":"%d"}}`, version)
			return
		}
		w.(http.Flusher).Flush()
		for {
			select {
			case e := <-s.events:
				fmt.Fprintln(w, e)
				w.(http.Flusher).Flush()
			case <-r.Context().Done():
				return
			}
		}
	}))
	t.Cleanup(func() {
		s.CloseClientConnections() // Close would wait for open watches
		s.Close()
	})
	return s
}

func (s *server) reached() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]string{}, s.requests...)
}

func clientOf(t *testing.T, i *Injector, s *server) *http.Client {
	t.Helper()
	transport, err := rest.TransportFor(i.Config(&rest.Config{Host: s.URL}))
	if err != nil {
		t.Fatal(err)
	}
	return &http.Client{Transport: transport}
}

const path = "/api/v1/namespaces/one/configmaps"

func do(t *testing.T, c *http.Client, s *server, method, url string) (int, string, error) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), method, s.URL+url, nil)
	if err != nil {
		t.Fatal(err)
	}
	response, err := c.Do(request)
	if err != nil {
		return 0, "", err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	var status struct{ Reason string }
	if err := json.Unmarshal(body, &status); err != nil {
		t.Fatal(err)
	}
	return response.StatusCode, status.Reason, nil
}

func TestRefusals(t *testing.T) {
	for name, test := range map[string]struct {
		schedule Schedule
		method   string
		code     int
		reason   string
		timeout  bool
		reached  int
	}{
		"no fault":          {Schedule{}, http.MethodPost, http.StatusOK, "", false, 1},
		"conflict":          {Schedule{Conflicts: 100}, http.MethodPatch, http.StatusConflict, "Conflict", false, 0},
		"read, no conflict": {Schedule{Conflicts: 100}, http.MethodGet, http.StatusOK, "", false, 1},
		"throttled":         {Schedule{Throttled: 100}, http.MethodGet, http.StatusTooManyRequests, "TooManyRequests", false, 0},
		"failed read":       {Schedule{Failed: 100}, http.MethodGet, http.StatusServiceUnavailable, "ServiceUnavailable", false, 0},
		"failed write":      {Schedule{Failed: 100}, http.MethodPost, http.StatusInternalServerError, "InternalError", false, 0},
		"timed out":         {Schedule{TimedOut: 100}, http.MethodPost, 0, "", true, 0},
		"answer lost":       {Schedule{Lost: 100}, http.MethodPost, 0, "", true, 1},
		"read, not lost":    {Schedule{Lost: 100}, http.MethodGet, http.StatusOK, "", false, 1},
		"whole object":      {Schedule{}, http.MethodPut, 0, "", false, 0},
		"crash at write 1":  {Schedule{CrashAfter: 1}, http.MethodPost, 0, "", false, 1},
	} {
		t.Run(name, func(t *testing.T) {
			s, i := newServer(t), New(test.schedule)
			code, reason, err := do(t, clientOf(t, i, s), s, test.method, path)
			if code != test.code || reason != test.reason || len(s.reached()) != test.reached {
				t.Errorf("got status %d %q, error %v; %d requests reached the server", code, reason, err, len(s.reached()))
			}
			var timeout interface{ Timeout() bool }
			if test.timeout && (!errors.As(err, &timeout) || !timeout.Timeout()) {
				t.Errorf("got error %v, want a timeout only where configured", err)
			}
			if last, wrote := i.LastWrites(), test.method != http.MethodGet && test.reached == 1; (len(last) == 1) != wrote || wrote && !strings.HasPrefix(last[0], test.method+" "+path+": 200") {
				t.Errorf("the latest writes are %q", last)
			}
			if wantRefused := test.method == http.MethodPut; (len(i.Refused()) == 1) != wantRefused {
				t.Errorf("refused %v", i.Refused())
			}
		})
	}
}

// TestCrash checks that no write is executed after the k-th one, even with concurrent writers.
func TestCrash(t *testing.T) {
	s, i := newServer(t), New(Schedule{CrashAfter: 5})
	c := clientOf(t, i, s)
	var writers sync.WaitGroup
	for range 20 {
		writers.Go(func() { do(t, c, s, http.MethodPost, path) }) //nolint:errcheck // most fail
	}
	writers.Wait()
	if got := len(s.reached()); got != 5 || i.Writes() != 5 {
		t.Errorf("%d writes were executed, %d counted, want 5", got, i.Writes())
	}
	select {
	case <-i.Crashed():
	default:
		t.Error("Crashed is not closed")
	}
	if _, _, err := do(t, c, s, http.MethodGet, path); !errors.Is(err, errCrashed) {
		t.Errorf("read after the crash: got error %v, want errCrashed", err)
	}
	if before := i.VersionBefore(2); before != "3" {
		t.Errorf("VersionBefore(2) is %q, want 3", before)
	}
	if before := i.VersionBefore(10); before != "1" {
		t.Errorf("VersionBefore(10) is %q, want the first version, 1", before)
	}
}

// TestOldList checks that only the first list of a kind for a cache gets the configured version. Later lists, and lists
// of the latest version, are unchanged.
func TestOldList(t *testing.T) {
	s, i := newServer(t), New(Schedule{ListVersion: "42", Lag: 1})
	c := clientOf(t, i, s)
	for _, url := range []string{path, path + "?resourceVersion=0", path + "?resourceVersion=0", path + "?labelSelector=a&resourceVersion=0"} {
		if _, _, err := do(t, c, s, http.MethodGet, url); err != nil {
			t.Fatal(err)
		}
	}
	if got := strings.Join(s.reached(), "\n"); got != "GET "+path+"\nGET "+path+"?resourceVersion=42&resourceVersionMatch=Exact\nGET "+path+"?resourceVersion=0\nGET "+path+"?labelSelector=a&resourceVersion=42&resourceVersionMatch=Exact" {
		t.Errorf("requests that reached the server:\n%s", got)
	}
	// A streaming list is refused, because it would return the latest state.
	if code, reason, err := do(t, c, s, http.MethodGet, path+"?watch=true&sendInitialEvents=true"); code != http.StatusUnprocessableEntity || reason != "Invalid" {
		t.Errorf("answered %d %q, %v", code, reason, err)
	}
}

// open opens a watch.
func open(t *testing.T, c *http.Client, s *server) *bufio.Reader {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, s.URL+path+"?watch=true", nil)
	if err != nil {
		t.Fatal(err)
	}
	response, err := c.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { response.Body.Close() })
	return bufio.NewReader(response.Body)
}

// TestLag checks that an event is delayed until the manager has done Lag more writes or LagTime has passed.
func TestLag(t *testing.T) {
	i := New(Schedule{Lag: 2, LagTime: time.Hour})
	s := newStream(i, path, io.NopCloser(strings.NewReader("")))
	i.done(http.StatusOK, nil) // before the event arrived
	came := make(chan error, 1)
	go func() { came <- s.wait(event{writes: 1, at: time.Now()}) }()
	for range 2 {
		select {
		case err := <-came:
			t.Fatalf("the event was returned after %d writes, error %v", i.Writes(), err)
		default:
		}
		i.done(http.StatusOK, nil)
	}
	if err := <-came; err != nil {
		t.Error(err)
	}
	if err := s.wait(event{writes: 3, at: time.Now().Add(-time.Hour)}); err != nil {
		t.Error(err)
	}
	go s.end(io.EOF)
	if err := s.wait(event{writes: 3, at: time.Now()}); !errors.Is(err, io.EOF) {
		t.Errorf("the watch ended with %v", err)
	}
}

// TestWatch checks that events arrive completely and in order with a lag.
func TestWatch(t *testing.T) {
	s, i := newServer(t), New(Schedule{Lag: 3, LagTime: time.Millisecond})
	lines := open(t, clientOf(t, i, s), s)
	for n := range 5 {
		s.events <- strings.Repeat(fmt.Sprint(n), 10000)
	}
	for n := range 5 {
		if line, err := lines.ReadString('\n'); err != nil || line != strings.Repeat(fmt.Sprint(n), 10000)+"\n" {
			t.Fatalf("event %d has %d bytes, error %v", n, len(line), err)
		}
	}
}

// TestInterruptedWatches checks that InterruptWatches ends watches and fails requests, and that a broken
// watch gets 410 Expired once after ResumeWatches.
func TestInterruptedWatches(t *testing.T) {
	s, i := newServer(t), New(Schedule{})
	c := clientOf(t, i, s)
	lines := open(t, c, s)
	i.InterruptWatches()
	if line, err := lines.ReadString('\n'); !errors.Is(err, io.EOF) {
		t.Errorf("read %q, %v", line, err)
	}
	if _, _, err := do(t, c, s, http.MethodGet, path); !errors.Is(err, errUnreachable) {
		t.Errorf("read after InterruptWatches: got error %v, want errUnreachable", err)
	}
	i.ResumeWatches()
	if code, reason, err := do(t, c, s, http.MethodGet, path+"?watch=true"); code != http.StatusGone || reason != "Expired" {
		t.Errorf("the watch after ResumeWatches: got status %d %q, error %v; want 410 Expired", code, reason, err)
	}
	go func() { // the server may send an event to the broken watch until it notices the end
		for {
			select {
			case s.events <- "after":
			case <-t.Context().Done():
				return
			}
		}
	}()
	if line, err := open(t, c, s).ReadString('\n'); err != nil || line != "after\n" {
		t.Errorf("read %q, %v", line, err)
	}
}

func TestClock(t *testing.T) {
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	schedule := Schedule{ClockBehind: 6 * time.Hour}
	for passed, want := range map[time.Duration]time.Time{0: now.Add(-6 * time.Hour), jumpPeriod: now, 2 * jumpPeriod: now.Add(-6 * time.Hour)} {
		if got := schedule.clock(now, passed); !got.Equal(want) {
			t.Errorf("after %v the clock shows %v, want %v", passed, got, want)
		}
	}
	if got := (Schedule{}).clock(now, 0); !got.Equal(now) {
		t.Errorf("a clock without an offset shows %v", got)
	}
}
