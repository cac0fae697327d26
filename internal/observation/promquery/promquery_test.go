// SPDX-License-Identifier: Apache-2.0

package promquery_test

import (
	"context"
	"encoding/pem"
	"errors"
	"fmt"
	"math"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/semmoe/operator/internal/observation/lar"
	"github.com/semmoe/operator/internal/observation/promquery"
	"github.com/semmoe/operator/test/ports"
)

var start = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// loopback returns a client for the test servers.
func loopback() *promquery.Client { return &promquery.Client{Hosts: promquery.Hosts{"127.0.0.1"}} }

// query returns a query for three values at intervals of a minute.
func query(address string) promquery.Query {
	return promquery.Query{Address: address, Expression: `avg(local)`, Start: start, End: start.Add(2 * time.Minute), Step: time.Minute}
}

// matrix returns a response with series of values.
func matrix(series ...string) string {
	return `{"status":"success","data":{"resultType":"matrix","result":[` + strings.Join(series, ",") + `]}}`
}

const one = `{"metric":{},"values":[[1772366400,"0.25"],[1772366460.000,"NaN"],[1772366520,"+Inf"]]}`

// answer starts a server with a constant response, and returns its URL.
func answer(t *testing.T, status int, text string) string {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		fmt.Fprint(w, text)
	}))
	t.Cleanup(server.Close)
	return server.URL
}

// TestRange verifies that the query conforms to the Prometheus API, with the token and below the path of the address,
// that values are returned in order, including values that are not finite, and that infos are no warnings.
func TestRange(t *testing.T) {
	var asked url.Values
	var path, authorization string
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := r.ParseForm(); err != nil {
			t.Error(err)
		}
		asked, path, authorization = r.Form, r.URL.Path, r.Header.Get("Authorization")
		fmt.Fprint(w, strings.Replace(matrix(one), `{`, `{"infos":["PromQL info: metric might not be a counter"],`, 1))
	}))
	t.Cleanup(server.Close)
	q := query(server.URL + "/tenant/a/")
	q.Token = "secret"
	got, err := loopback().Range(t.Context(), q)
	if err != nil {
		t.Fatal(err)
	}
	want := []lar.Point{{Time: start, Value: 0.25}, {Time: start.Add(time.Minute), Value: math.NaN()}, {Time: start.Add(2 * time.Minute), Value: math.Inf(1)}}
	if diff := cmp.Diff(want, got, cmpopts.EquateNaNs(), cmpopts.EquateApproxTime(0)); diff != "" {
		t.Errorf("points (-want +got):\n%s", diff)
	}
	form := url.Values{"query": {"avg(local)"}, "start": {"1772366400"}, "end": {"1772366520"}, "step": {"60"}}
	if diff := cmp.Diff(form, asked); diff != "" || path != "/tenant/a/api/v1/query_range" || authorization != "Bearer secret" {
		t.Errorf("query at %s with authorization %q (-want +got):\n%s", path, authorization, diff)
	}
}

// TestRangeFails verifies that every failure has one of a few reasons and a constant message, which do not disclose
// whether an address is open, nor the status or text of a response.
func TestRangeFails(t *testing.T) {
	elsewhere := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { t.Error("a redirect was followed") }))
	t.Cleanup(elsewhere.Close)
	redirecting := httptest.NewServer(http.RedirectHandler(elsewhere.URL, http.StatusTemporaryRedirect))
	t.Cleanup(redirecting.Close)
	cut := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", "1000")
		fmt.Fprint(w, "{")
	}))
	t.Cleanup(cut.Close)
	encrypted := httptest.NewTLSServer(http.NotFoundHandler())
	t.Cleanup(encrypted.Close)
	swollen := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("X", strings.Repeat("x", 1<<20))
		fmt.Fprint(w, matrix(one))
	}))
	t.Cleanup(swollen.Close)
	warning := `{"status":"success","warnings":["secret"],"data":{"resultType":"matrix","result":[` + one + `]}}`
	messages := map[string]string{}
	for name, tc := range map[string]struct{ address, reason string }{
		"no series":           {answer(t, 200, matrix()), promquery.NoSeries},
		"several series":      {answer(t, 200, matrix(one, one)), promquery.SeveralSeries},
		"instant vector":      {answer(t, 200, `{"status":"success","data":{"resultType":"vector","result":[]}}`), promquery.Unavailable},
		"unknown type":        {answer(t, 200, `{"status":"success","data":{"resultType":"secret","result":[]}}`), promquery.Unavailable},
		"no data":             {answer(t, 200, `{"status":"success"}`), promquery.Unavailable},
		"not JSON":            {answer(t, 200, `<html>secret</html>`), promquery.Unavailable},
		"empty":               {answer(t, 204, ``), promquery.Unavailable},
		"too long":            {answer(t, 200, matrix(`{"metric":{"a":"`+strings.Repeat("x", 2<<20)+`"},"values":[]}`)), promquery.Unavailable},
		"header too long":     {swollen.URL, promquery.Unavailable},
		"warning":             {answer(t, 200, warning), promquery.Warned},
		"parse error":         {answer(t, 400, `{"status":"error","errorType":"bad_data","error":"secret"}`), promquery.Refused},
		"long error":          {answer(t, 422, `{"status":"error","errorType":"execution","error":"`+strings.Repeat("é", 500)+`"}`), promquery.Refused},
		"query timed out":     {answer(t, 422, `{"status":"error","errorType":"timeout","error":"secret"}`), promquery.Refused},
		"unknown error type":  {answer(t, 400, `{"status":"error","errorType":"secret","error":"secret"}`), promquery.Unavailable},
		"bad request":         {answer(t, 400, "secret"), promquery.Unavailable},
		"unauthorized":        {answer(t, 401, "secret"), promquery.Unavailable},
		"forbidden":           {answer(t, 403, "secret"), promquery.Unavailable},
		"not found":           {gone404(t), promquery.Unavailable},
		"overloaded":          {answer(t, 503, "secret"), promquery.Unavailable},
		"redirect":            {redirecting.URL, promquery.Unavailable},
		"truncated":           {cut.URL, promquery.Unavailable},
		"connection refused":  {"http://" + ports.Address(t), promquery.Unavailable},
		"unknown certificate": {encrypted.URL, promquery.Unavailable},
		"TLS to plain HTTP":   {strings.Replace(redirecting.URL, "http:", "https:", 1), promquery.Unavailable},
		"invalid URL":         {"http://[::1", promquery.NotAllowed},
	} {
		t.Run(name, func(t *testing.T) {
			points, err := loopback().Range(t.Context(), query(tc.address))
			var queryError *promquery.Error
			if points != nil || !errors.As(err, &queryError) {
				t.Fatalf("got %v and error %v, want an *Error", points, err)
			}
			if queryError.Reason != tc.reason {
				t.Errorf("reason %s (%s, %v), want %s", queryError.Reason, queryError.Message, queryError.Cause, tc.reason)
			}
			if other, known := messages[queryError.Reason]; known && other != queryError.Message {
				t.Errorf("reason %s has the messages %q and %q", queryError.Reason, other, queryError.Message)
			}
			messages[queryError.Reason] = queryError.Message
			if strings.Contains(queryError.Message, "secret") || len(queryError.Message) > 250 {
				t.Errorf("the message %q contains text of the response", queryError.Message)
			}
		})
	}
}

// gone404 starts a server without the path of the API, and returns its URL.
func gone404(t *testing.T) string {
	t.Helper()
	server := httptest.NewServer(http.NotFoundHandler())
	t.Cleanup(server.Close)
	return server.URL
}

// TestPrivateAuthority verifies that a server with a certificate of a private CA is reachable if $SSL_CERT_DIR contains
// the CA certificate, as a mounted ConfigMap does, and unavailable otherwise.
func TestPrivateAuthority(t *testing.T) {
	const asked = "PROMQUERY_TEST_ADDRESS" // for the child process, because a process reads its CA certificates only once
	if address := os.Getenv(asked); address != "" {
		_, err := loopback().Range(t.Context(), query(address))
		fmt.Println("error:", err)
		return
	}
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, matrix(one)) }))
	t.Cleanup(server.Close)
	mounted := t.TempDir()
	if err := errors.Join(
		os.Mkdir(filepath.Join(mounted, "..2026"), 0o755), os.Symlink("..2026", filepath.Join(mounted, "..data")), os.Symlink("..data/ca.crt", filepath.Join(mounted, "ca.crt")),
		os.WriteFile(filepath.Join(mounted, "..2026", "ca.crt"), pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}), 0o644),
	); err != nil {
		t.Fatal(err)
	}
	for directory, want := range map[string]string{mounted: "error: <nil>\n", t.TempDir(): "error: Prometheus returned no usable response"} {
		command := exec.Command(os.Args[0], "-test.run=^TestPrivateAuthority$")
		command.Env = []string{"SSL_CERT_DIR=" + directory, asked + "=" + server.URL}
		if output, err := command.CombinedOutput(); err != nil || !strings.HasPrefix(string(output), want) {
			t.Errorf("want %q, got %v\n%s", want, err, output)
		}
	}
}

// hanging is a transport that never responds. It returns when the request is canceled.
type hanging struct{ asked int }

func (h *hanging) RoundTrip(request *http.Request) (*http.Response, error) {
	h.asked++
	if _, bounded := request.Context().Deadline(); !bounded {
		return nil, errors.New("the request has no deadline")
	}
	return nil, context.DeadlineExceeded
}

// TestRangeBacksOff verifies that a server that did not respond is not queried again during the backoff. The backoff is
// per address and applies to all queries.
func TestRangeBacksOff(t *testing.T) {
	now, transport := start, &hanging{}
	client := &promquery.Client{Hosts: promquery.Hosts{"a", "b", "127.0.0.1"}, Transport: transport, Now: func() time.Time { return now }}
	for i, step := range []struct {
		after   time.Duration
		address string
		asked   int // total number of queries
	}{
		{0, "http://a", 1}, {49 * time.Second, "http://a", 1}, {0, "http://b", 2}, {2 * time.Second, "http://a", 3}, {0, "http://a", 3}, {0, "http://b", 3}, {51 * time.Second, "http://b", 4},
	} {
		now = now.Add(step.after)
		_, err := client.Range(t.Context(), query(step.address))
		var queryError *promquery.Error
		if !errors.As(err, &queryError) || queryError.Reason != promquery.Unavailable {
			t.Fatalf("step %d: error %v, want reason PrometheusUnavailable", i, err)
		}
		if transport.asked != step.asked {
			t.Errorf("step %d: %d queries, want %d", i, transport.asked, step.asked)
		}
	}
	// A query that the caller cancels does not start a backoff.
	client.Transport = nil
	address := answer(t, 200, matrix(one))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := client.Range(ctx, query(address)); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want context.Canceled", err)
	}
	if _, err := client.Range(t.Context(), query(address)); err != nil {
		t.Errorf("query after the cancellation: %v", err)
	}
}
