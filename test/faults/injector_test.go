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
		"GET /api":                                          aside,
		"GET /api/v1":                                       aside,
		"GET /apis/apps/v1":                                 aside,
		"GET /version":                                      aside,
		"GET /api/v1/pods":                                  listing,
		"GET /api/v1/namespaces":                            listing,
		"GET /api/v1/namespaces/one":                        reading,
		"GET /api/v1/namespaces/one/pods":                   listing,
		"GET /api/v1/namespaces/one/pods/p":                 reading,
		"GET /api/v1/pods?watch=true":                       watching,
		"GET /apis/apps/v1/statefulsets":                    listing,
		"POST /api/v1/namespaces/one/pods":                  writing,
		"DELETE /api/v1/namespaces/one":                     writing,
		"POST /api/v1/namespaces/one/events":                aside,
		"PATCH /apis/apps/v1/namespaces/one/statefulsets/s": writing,
		"PATCH /apis/semmoe.io/v1/namespaces/o/moedeployments/m/status": writing,
		"PUT /apis/coordination.k8s.io/v1/namespaces/one/leases/l":      aside,
		"GET /apis/apps/v1/namespaces/one/statefulsets?watch=true":      watching,
		"GET /apis/apps/v1/namespaces/one/statefulsets/s/scale":         reading,
	} {
		method, url, _ := strings.Cut(request, " ")
		if got := purposeOf(httptest.NewRequest(method, url, nil)); got != want {
			t.Errorf("%s is %d, want %d", request, got, want)
		}
	}
}

// The shares are those asked for, and reads are spared what is only for writes.
func TestChoices(t *testing.T) {
	schedule := Schedule{Seed: 7, Conflicts: 30, Throttled: 5, Failed: 10, TimedOut: 5, Lost: 20}
	const n = 20000
	for _, write := range []bool{false, true} {
		hits := map[fault]int{}
		for i := range uint64(n) {
			chosen := schedule.choose(i, write)
			hits[chosen]++
			if again := schedule.choose(i, write); again != chosen {
				t.Fatalf("request %d is %q, and then %q", i, chosen, again)
			}
		}
		for f, percent := range map[fault]int{throttled: 5, failed: 10, timedOut: 5, conflict: 30, lost: 20} {
			if !write && (f == conflict || f == lost) {
				percent = 0
			}
			// Six standard deviations.
			if got := hits[f]; percent == 0 && got != 0 || got < n*percent/100-400 || got > n*percent/100+400 {
				t.Errorf("writes %t: %s hits %d of %d, want %d%%", write, f, got, n, percent)
			}
		}
	}
}

// server answers every write with the next resource version, records what reached it, and sends events to watches.
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
		s.CloseClientConnections() // or a watch that is open would be waited for
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
		"nothing":             {Schedule{}, http.MethodPost, http.StatusOK, "", false, 1},
		"conflict":            {Schedule{Conflicts: 100}, http.MethodPatch, http.StatusConflict, "Conflict", false, 0},
		"read, no conflict":   {Schedule{Conflicts: 100}, http.MethodGet, http.StatusOK, "", false, 1},
		"throttled":           {Schedule{Throttled: 100}, http.MethodGet, http.StatusTooManyRequests, "TooManyRequests", false, 0},
		"failed read":         {Schedule{Failed: 100}, http.MethodGet, http.StatusServiceUnavailable, "ServiceUnavailable", false, 0},
		"failed write":        {Schedule{Failed: 100}, http.MethodPost, http.StatusInternalServerError, "InternalError", false, 0},
		"timed out":           {Schedule{TimedOut: 100}, http.MethodPost, 0, "", true, 0},
		"answer lost":         {Schedule{Lost: 100}, http.MethodPost, 0, "", true, 1},
		"a read's is not":     {Schedule{Lost: 100}, http.MethodGet, http.StatusOK, "", false, 1},
		"whole object":        {Schedule{}, http.MethodPut, 0, "", false, 0},
		"dead from the first": {Schedule{CrashAfter: 1}, http.MethodPost, 0, "", false, 1},
	} {
		t.Run(name, func(t *testing.T) {
			s, i := newServer(t), New(test.schedule)
			code, reason, err := do(t, clientOf(t, i, s), s, test.method, path)
			if code != test.code || reason != test.reason || len(s.reached()) != test.reached {
				t.Errorf("answered %d %q, %v; %d requests came through", code, reason, err, len(s.reached()))
			}
			var timeout interface{ Timeout() bool }
			if test.timeout && (!errors.As(err, &timeout) || !timeout.Timeout()) {
				t.Errorf("the error is %v", err)
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

// The k-th write is the last that is done, whoever writes at the same time.
func TestCrash(t *testing.T) {
	s, i := newServer(t), New(Schedule{CrashAfter: 5})
	c := clientOf(t, i, s)
	var writers sync.WaitGroup
	for range 20 {
		writers.Go(func() { do(t, c, s, http.MethodPost, path) }) //nolint:errcheck // most fail
	}
	writers.Wait()
	if got := len(s.reached()); got != 5 || i.Writes() != 5 {
		t.Errorf("%d writes were done, %d counted, want 5", got, i.Writes())
	}
	select {
	case <-i.Crashed():
	default:
		t.Error("nobody is told")
	}
	if _, _, err := do(t, c, s, http.MethodGet, path); !errors.Is(err, errCrashed) {
		t.Errorf("a dead manager reads: %v", err)
	}
	if before := i.VersionBefore(2); before != "3" {
		t.Errorf("two writes ago the version was %q, want 3", before)
	}
	if before := i.VersionBefore(10); before != "1" {
		t.Errorf("ten writes ago the version was %q, want the first, 1", before)
	}
}

// The first list of a kind for a cache is as old as asked for, and neither later ones are nor those that want the latest.
func TestOldList(t *testing.T) {
	s, i := newServer(t), New(Schedule{ListVersion: "42", Lag: 1})
	c := clientOf(t, i, s)
	for _, url := range []string{path, path + "?resourceVersion=0", path + "?resourceVersion=0", path + "?labelSelector=a&resourceVersion=0"} {
		if _, _, err := do(t, c, s, http.MethodGet, url); err != nil {
			t.Fatal(err)
		}
	}
	if got := strings.Join(s.reached(), "\n"); got != "GET "+path+"\nGET "+path+"?resourceVersion=42&resourceVersionMatch=Exact\nGET "+path+"?resourceVersion=0\nGET "+path+"?labelSelector=a&resourceVersion=42&resourceVersionMatch=Exact" {
		t.Errorf("came through:\n%s", got)
	}
	// A list within a watch would be new.
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

// An event is held back until the manager has done so many writes after it came, or it is too old.
func TestLag(t *testing.T) {
	i := New(Schedule{Lag: 2, LagTime: time.Hour})
	s := newStream(i, path, io.NopCloser(strings.NewReader("")))
	i.done(http.StatusOK, nil) // before it came
	came := make(chan error, 1)
	go func() { came <- s.wait(event{writes: 1, at: time.Now()}) }()
	for range 2 {
		select {
		case err := <-came:
			t.Fatalf("it came after %d writes, %v", i.Writes(), err)
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
		t.Errorf("the end of the watch is %v", err)
	}
}

// Events come in their order, whole, and in spite of a lag.
func TestWatch(t *testing.T) {
	s, i := newServer(t), New(Schedule{Lag: 3, LagTime: time.Millisecond})
	lines := open(t, clientOf(t, i, s), s)
	for n := range 5 {
		s.events <- strings.Repeat(fmt.Sprint(n), 10000)
	}
	for n := range 5 {
		if line, err := lines.ReadString('\n'); err != nil || line != strings.Repeat(fmt.Sprint(n), 10000)+"\n" {
			t.Fatalf("event %d is of %d bytes, %v", n, len(line), err)
		}
	}
}

// A blind manager sees its watches end, and reaches nothing; when it sees again, the watch that broke is too old, once.
func TestBlind(t *testing.T) {
	s, i := newServer(t), New(Schedule{})
	c := clientOf(t, i, s)
	lines := open(t, c, s)
	i.Blind()
	if line, err := lines.ReadString('\n'); !errors.Is(err, io.EOF) {
		t.Errorf("read %q, %v", line, err)
	}
	if _, _, err := do(t, c, s, http.MethodGet, path); !errors.Is(err, errBlind) {
		t.Errorf("a blind manager reads: %v", err)
	}
	i.See()
	if code, reason, err := do(t, c, s, http.MethodGet, path+"?watch=true"); code != http.StatusGone || reason != "Expired" {
		t.Errorf("the watch goes on with %d %q, %v", code, reason, err)
	}
	go func() { // one may go to the watch that broke, which the server does not know yet
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
		t.Errorf("a clock that nobody sets shows %v", got)
	}
}
