// SPDX-License-Identifier: Apache-2.0

package childobjects

import (
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
)

// rendered returns a workload of a spec, with a ready pod at an address.
func rendered(t *testing.T, moed *semmoev1.MoEDeployment, address string) (*revisions.Workload, *corev1.Pod, client.Client) {
	t.Helper()
	workload, err := revisions.Render(moed, "r1", moedtest.Report(), nil, revisions.Own{Image: "semmoe:1"})
	if err != nil {
		t.Fatal(err)
	}
	scheme := runtime.NewScheme()
	if err := appsv1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	workload.UID = "uid-1"
	c := fake.NewClientBuilder().WithScheme(scheme).WithObjects(workload.Object).Build()
	at, err := url.Parse(address)
	if err != nil {
		t.Fatal(err)
	}
	pod := moedtest.Pod("m-r1-0", "r1", func(p *corev1.Pod) {
		p.Annotations = map[string]string{semmoev1.AnnotationPort: at.Port(), semmoev1.AnnotationScheme: at.Scheme}
		p.Status.PodIP = at.Hostname()
		p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "StatefulSet", Name: workload.Name, UID: workload.UID, Controller: ptr.To(true)}}
	})
	return workload, pod, c
}

// TestRecordReleases queries each engine at its release endpoint, and stores the result on the workload. Steady state
// causes no query.
func TestRecordReleases(t *testing.T) {
	for name, test := range map[string]struct {
		engine  semmoev1.EngineType
		path    string
		status  int
		answer  string
		want    string
		release string
		again   bool
		secured bool
	}{
		"TLS":              {engine: semmoev1.EngineSGLang, path: "/server_info", status: 200, answer: `{"version":"0.5.17"}`, want: "0.5.17", release: "0.5.17", secured: true},
		"SGLang":           {engine: semmoev1.EngineSGLang, path: "/server_info", status: 200, answer: `{"version":"0.5.17","dp_size":4}`, want: "0.5.17", release: "0.5.17"},
		"vLLM":             {engine: semmoev1.EngineVLLM, path: "/version", status: 200, answer: `{"version":"0.32.0+cpu"}`, want: "0.32.0", release: "0.32.0"},
		"no release":       {engine: semmoev1.EngineSGLang, path: "/server_info", status: 200, answer: `{}`, want: "unknown"},
		"no route":         {engine: semmoev1.EngineSGLang, path: "/server_info", status: 404, want: "unknown"},
		"not yet":          {engine: semmoev1.EngineSGLang, path: "/server_info", status: 503, again: true},
		"invalid response": {engine: semmoev1.EngineSGLang, path: "/server_info", status: 200, answer: strings.Repeat("x", releaseBytes+1), want: "unknown"},
	} {
		t.Run(name, func(t *testing.T) {
			asked := 0
			web := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if asked++; r.Method != http.MethodGet || r.URL.Path != test.path {
					t.Errorf("asked %s %s", r.Method, r.URL.Path)
				}
				w.WriteHeader(test.status)
				_, _ = w.Write([]byte(test.answer))
			}))
			if test.secured {
				web.StartTLS()
			} else {
				web.Start()
			}
			defer web.Close()
			moed := moedtest.Deployment(moedtest.EngineOf(test.engine))
			workload, pod, c := rendered(t, moed, web.URL)
			var releases Releases
			now := moedtest.Start
			for range 3 {
				writes, again := releases.Ask(t.Context(), web.Client(), []*revisions.Workload{workload}, []*corev1.Pod{pod}, now)
				for _, write := range writes {
					if err := (Writer{Client: c}).Write(t.Context(), moed, write); err != nil {
						t.Fatal(err)
					}
				}
				if (again > 0) != test.again {
					t.Fatalf("again %v", again)
				}
			}
			if asked != 1 {
				t.Errorf("the pod was queried %d times, want at most once per minute", asked)
			}
			live := &appsv1.StatefulSet{}
			if err := c.Get(t.Context(), client.ObjectKeyFromObject(workload.Object), live); err != nil {
				t.Fatal(err)
			}
			if got := live.Annotations["semmoe.io/engine-release"]; got != test.want {
				t.Errorf("the annotation is %q, want %q", got, test.want)
			}
			if got := revisions.Release(moed, []*revisions.Workload{workload}).String(); got != test.release {
				t.Errorf("the release is %q, want %q", got, test.release)
			}
			if test.again {
				if releases.Ask(t.Context(), web.Client(), []*revisions.Workload{workload}, []*corev1.Pod{pod}, now.Add(time.Minute)); asked != 2 {
					t.Errorf("after a minute: queried %d times", asked)
				}
			}
		})
	}
}
