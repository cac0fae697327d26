// SPDX-License-Identifier: Apache-2.0

package store

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/funcr"
	"github.com/prometheus/client_golang/prometheus"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/utils/ptr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/artifact"
)

// serveHandler serves a store on a directory, with callers identified by a function, and returns its address.
func serveHandler(t *testing.T, maxBytes int64, log logr.Logger, identify func(context.Context, string, string) (caller, error)) (*handler, string) {
	t.Helper()
	store, err := open(t.Context(), "file://"+t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	h := &handler{store: store, identify: identify, metrics: newMetrics(prometheus.NewRegistry()), log: log, maxBytes: maxBytes, uploads: uploads{max: maxUploads}}
	server := httptest.NewServer(h.routes())
	t.Cleanup(func() {
		server.Close()
		if err := store.Close(); err != nil {
			t.Error(err)
		}
	})
	return h, server.URL
}

func theManager(context.Context, string, string) (caller, error) { return caller{manager: true}, nil }

// aPod returns the pod of a Job that creates the profile of scopeID.
func aPod(context.Context, string, string) (caller, error) {
	return caller{pod: &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
		Namespace: "team", Name: "p", Labels: map[string]string{semmoev1.LabelComponent: semmoev1.ComponentProfile, semmoev1.LabelInputs: scopeID},
		OwnerReferences: []metav1.OwnerReference{{Kind: "Job", Name: "j", Controller: ptr.To(true)}},
	}}}, nil
}

// putRequest returns an upload of content to a scope. body may be a different reader of the same bytes.
func putRequest(t *testing.T, address, id string, content []byte, body io.Reader) *http.Request {
	t.Helper()
	digest, size, err := artifact.DigestOf(bytes.NewReader(content))
	if err != nil {
		t.Fatal(err)
	}
	url := fmt.Sprintf("%s/v1/namespaces/team/profiles/%s/artifacts/%s", address, id, digest)
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPut, url, body)
	if err != nil {
		t.Fatal(err)
	}
	request.ContentLength = size
	return request
}

const scopeID = "0123456789abcdef"

func statusOf(t *testing.T, request *http.Request) int {
	t.Helper()
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	response.Body.Close()
	return response.StatusCode
}

// The number of uploads in progress of a pod is limited. Further uploads are rejected until one ends.
func TestUploadsOfAPodAreLimited(t *testing.T) {
	_, address := serveHandler(t, 1<<20, logr.Discard(), aPod)
	content := []byte("content")
	var ends []func()
	for i := range maxCallerUploads {
		reader, writer := io.Pipe()
		begun, ended := make(chan struct{}), make(chan int, 1)
		request := putRequest(t, address, scopeID, content, reader)
		request.Header.Set("Expect", "100-continue") // the server sends it when it starts to read
		request = request.WithContext(httptrace.WithClientTrace(request.Context(), &httptrace.ClientTrace{Got100Continue: func() { close(begun) }}))
		client := &http.Client{Transport: &http.Transport{ExpectContinueTimeout: time.Minute, DisableKeepAlives: true}}
		go func() {
			response, err := client.Do(request)
			if err != nil {
				ended <- 0
				return
			}
			response.Body.Close()
			ended <- response.StatusCode
		}()
		<-begun
		ends = append(ends, func() {
			t.Helper()
			if _, err := writer.Write(content); err != nil {
				t.Error(err)
			}
			writer.Close()
			if code := <-ended; code != http.StatusCreated {
				t.Errorf("upload %d ends with status %d", i, code)
			}
		})
	}
	if code := statusOf(t, putRequest(t, address, scopeID, content, bytes.NewReader(content))); code != http.StatusTooManyRequests {
		t.Errorf("upload above the limit: status %d, want 429", code)
	}
	for _, end := range ends {
		end()
	}
	if code := statusOf(t, putRequest(t, address, scopeID, content, bytes.NewReader(content))); code != http.StatusCreated {
		t.Errorf("after they have ended: status %d", code)
	}
}

// The total number of uploads in progress is limited. Ended uploads do not count.
func TestUploadsAreLimited(t *testing.T) {
	u := uploads{max: maxUploads}
	var ends []func()
	for range maxUploads {
		end, err := u.begin(caller{manager: true})
		if err != nil {
			t.Fatal(err)
		}
		ends = append(ends, end)
	}
	if _, err := u.begin(caller{pod: &corev1.Pod{}}); code(err) != http.StatusTooManyRequests {
		t.Errorf("error %v, want 429", err)
	}
	for _, end := range ends {
		end()
	}
	if u.total != 0 || len(u.byCaller) != 0 {
		t.Errorf("%d uploads of %v are still counted", u.total, u.byCaller)
	}
}

// The number of bytes in a scope is limited. Existing artifacts can be stored again.
func TestScopesAreLimited(t *testing.T) {
	_, address := serveHandler(t, 8, logr.Discard(), theManager)
	content := func(i int) []byte { return []byte(fmt.Sprintf("%08d", i)) }
	put := func(id string, i int) int {
		return statusOf(t, putRequest(t, address, id, content(i), bytes.NewReader(content(i))))
	}
	for i := range maxScopeUploads {
		if code := put(scopeID, i); code != http.StatusCreated {
			t.Fatalf("artifact %d: status %d", i, code)
		}
	}
	if code := put(scopeID, maxScopeUploads); code != http.StatusRequestEntityTooLarge {
		t.Errorf("artifact above the limit: status %d, want 413", code)
	}
	if code := put(scopeID, 0); code != http.StatusCreated {
		t.Errorf("existing artifact: status %d", code)
	}
	if code := put("fedcba9876543210", 0); code != http.StatusCreated {
		t.Errorf("another scope: status %d", code)
	}
	if err := checkScope(make([]artifact.Artifact, maxScopeArtifacts), "x", 0, 8); code(err) != http.StatusRequestEntityTooLarge {
		t.Errorf("%d empty artifacts and one more: %v", maxScopeArtifacts, err)
	}
}

// deadlines records the read deadlines of a connection.
type deadlines struct {
	http.ResponseWriter
	set []time.Time
}

func (d *deadlines) SetReadDeadline(at time.Time) error {
	d.set = append(d.set, at)
	return nil
}

// The parts of an upload extend its read deadline up to a deadline that depends on its size. A slow upload ends at that
// deadline.
func TestSlowUploadsEnd(t *testing.T) {
	begin := time.Now()
	if got := uploadDeadline(begin, 640<<10).Sub(begin); got != stallTimeout+10*time.Second {
		t.Errorf("deadline of an upload of 640 KiB: %v", got)
	}
	var connection deadlines
	body := &upload{r: strings.NewReader("ab"), control: http.NewResponseController(&connection), deadline: begin.Add(stallTimeout / 2)}
	if _, err := body.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	if len(connection.set) != 1 || !connection.set[0].Equal(body.deadline) {
		t.Errorf("read deadlines %v, want %v", connection.set, body.deadline)
	}
	body.deadline = begin.Add(time.Hour)
	if _, err := body.Read(make([]byte, 1)); err != nil || connection.set[1].Sub(begin) > 2*stallTimeout {
		t.Errorf("read deadlines %v, error %v; a part has %v", connection.set, err, stallTimeout)
	}
}

// Responses to clients contain no causes, because causes can contain addresses of the cluster. The log contains them.
func TestResponsesHaveNoCauses(t *testing.T) {
	const secret = "10.96.0.1"
	for name, tc := range map[string]struct {
		review func() (*authenticationv1.TokenReview, error)
		want   int
	}{
		"the API server is away": {func() (*authenticationv1.TokenReview, error) {
			return nil, errors.New("dial tcp " + secret + ":443: connect: connection refused")
		}, http.StatusServiceUnavailable},
		"the API server refuses": {func() (*authenticationv1.TokenReview, error) {
			return &authenticationv1.TokenReview{Status: authenticationv1.TokenReviewStatus{Error: "invalid issuer https://" + secret}}, nil
		}, http.StatusUnauthorized},
	} {
		t.Run(name, func(t *testing.T) {
			clients := fake.NewClientset()
			clients.PrependReactor("create", "tokenreviews", func(clienttesting.Action) (bool, runtime.Object, error) {
				answer, err := tc.review()
				return true, answer, err
			})
			logged := make(chan string, 10)
			log := funcr.New(func(_, args string) { logged <- args }, funcr.Options{})
			identify := newReviewer(clients, types.NamespacedName{Namespace: "s", Name: "m"}, newMetrics(prometheus.NewRegistry())).identify
			_, address := serveHandler(t, 1<<20, log, identify)
			request := putRequest(t, address, scopeID, []byte("x"), strings.NewReader("x"))
			request.Header.Set("Authorization", "Bearer "+jwt(time.Now().Add(time.Hour)))
			response, err := http.DefaultClient.Do(request)
			if err != nil {
				t.Fatal(err)
			}
			defer response.Body.Close()
			var answer struct{ Error string }
			if err := json.NewDecoder(response.Body).Decode(&answer); err != nil {
				t.Fatal(err)
			}
			if response.StatusCode != tc.want || answer.Error == "" || strings.Contains(answer.Error, secret) {
				t.Errorf("%s: %q; want status %d without the cause", response.Status, answer.Error, tc.want)
			}
			if line := <-logged; !strings.Contains(line, secret) {
				t.Errorf("the log does not contain the cause: %s", line)
			}
		})
	}
}
