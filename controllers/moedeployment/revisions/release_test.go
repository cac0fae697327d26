package revisions

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
)

// rendered returns a workload of a spec, with a ready pod at an address.
func rendered(t *testing.T, moed *semmoev1.MoEDeployment, address string) (*Workload, *corev1.Pod, client.Client) {
	t.Helper()
	workload, err := Render(moed, "r1", moedtest.Report(), nil, Own{Image: "semmoe:1"})
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
		p.Annotations = map[string]string{semmoev1.AnnotationPort: at.Port()}
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
	}{
		"SGLang":           {engine: semmoev1.EngineSGLang, path: "/server_info", status: 200, answer: `{"version":"0.5.17","dp_size":4}`, want: "0.5.17", release: "0.5.17"},
		"vLLM":             {engine: semmoev1.EngineVLLM, path: "/version", status: 200, answer: `{"version":"0.32.0+cpu"}`, want: "0.32.0", release: "0.32.0"},
		"no release":       {engine: semmoev1.EngineSGLang, path: "/server_info", status: 200, answer: `{}`, want: "unknown"},
		"no route":         {engine: semmoev1.EngineSGLang, path: "/server_info", status: 404, want: "unknown"},
		"not yet":          {engine: semmoev1.EngineSGLang, path: "/server_info", status: 503, again: true},
		"invalid response": {engine: semmoev1.EngineSGLang, path: "/server_info", status: 200, answer: strings.Repeat("x", releaseBytes+1), want: "unknown"},
	} {
		t.Run(name, func(t *testing.T) {
			asked := 0
			web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if asked++; r.Method != http.MethodGet || r.URL.Path != test.path {
					t.Errorf("asked %s %s", r.Method, r.URL.Path)
				}
				w.WriteHeader(test.status)
				_, _ = w.Write([]byte(test.answer))
			}))
			defer web.Close()
			moed := moedtest.Deployment(moedtest.EngineOf(test.engine))
			workload, pod, c := rendered(t, moed, web.URL)
			var releases Releases
			now := moedtest.Start
			for range 3 {
				again, err := releases.Record(t.Context(), c, web.Client(), []*Workload{workload}, []*corev1.Pod{pod}, now)
				if err != nil || (again > 0) != test.again {
					t.Fatalf("again %v, error %v", again, err)
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
			if got := Release(moed, []*Workload{workload}).String(); got != test.release {
				t.Errorf("the release is %q, want %q", got, test.release)
			}
			if test.again {
				if _, err := releases.Record(t.Context(), c, web.Client(), []*Workload{workload}, []*corev1.Pod{pod}, now.Add(time.Minute)); err != nil || asked != 2 {
					t.Errorf("after a minute: queried %d times, error %v", asked, err)
				}
			}
		})
	}
}

// TestRelease reads the release from a workload with the same engine and image, or else from the image's tag.
func TestRelease(t *testing.T) {
	stock := func(m *semmoev1.MoEDeployment) { m.Spec.Engine.Image = "lmsysorg/sglang:v0.5.12" }
	reported := func(change ...func(*semmoev1.MoEDeployment)) *Workload {
		workload, _, _ := rendered(t, moedtest.Deployment(change...), "http://10.0.0.1:30000")
		workload.Annotations[semmoev1.AnnotationEngineRelease] = "0.5.17"
		return workload
	}
	replaced := func(m *semmoev1.MoEDeployment) {
		m.Spec.Template = &corev1.PodTemplateSpec{Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "engine", Image: "lmsysorg/sglang:v0.5.14"}}}}
	}
	for name, test := range map[string]struct {
		moed      *semmoev1.MoEDeployment
		workloads []*Workload
		want      string
	}{
		"tag":                       {moedtest.Deployment(stock), nil, "0.5.12"},
		"image of a template":       {moedtest.Deployment(stock, replaced), nil, "0.5.14"},
		"unknown":                   {moedtest.Deployment(), nil, ""},
		"reported":                  {moedtest.Deployment(stock), []*Workload{reported(stock)}, "0.5.17"},
		"reported by another image": {moedtest.Deployment(stock), []*Workload{reported()}, "0.5.12"},
		"another engine":            {moedtest.Deployment(moedtest.EngineOf(semmoev1.EngineVLLM)), []*Workload{reported()}, ""},
	} {
		if got := Release(test.moed, test.workloads).String(); got != test.want {
			t.Errorf("%s: %q, want %q", name, got, test.want)
		}
	}
}

// TestValidateRelease rejects settings that a release does not support, and accepts all settings for an unknown
// release.
func TestValidateRelease(t *testing.T) {
	vllm := func(image string, change ...func(*semmoev1.MoEDeployment)) *semmoev1.MoEDeployment {
		moed := moedtest.Deployment(moedtest.EngineOf(semmoev1.EngineVLLM), func(m *semmoev1.MoEDeployment) {
			m.Spec.Engine.Image, m.Spec.Profiling = image, &semmoev1.ProfilingSpec{Dataset: &semmoev1.DatasetSpec{Path: "/models/d"}}
		})
		for _, c := range change {
			c(moed)
		}
		return moed
	}
	connector := func(m *semmoev1.MoEDeployment) {
		m.Spec.Engine.Args = []string{"--kv-transfer-config", `{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both"}`}
	}
	for name, test := range map[string]struct {
		moed         *semmoev1.MoEDeployment
		reason, want string
	}{
		"old":       {vllm("vllm/vllm-openai:v0.17.0"), "EngineReleaseTooOld", "VLLM 0.17.0 is invalid"},
		"new":       {vllm("vllm/vllm-openai:v0.22.0"), "", ""},
		"latest":    {vllm("vllm/vllm-openai:latest"), "", ""},
		"connector": {vllm("vllm/vllm-openai:v0.22.0", connector), "CaptureUnsupported", "set spec.routing.samplePercent to 0 and give spec.profiling.profileRef"},
		"connector, nothing sampled": {vllm("vllm/vllm-openai:v0.22.0", connector, func(m *semmoev1.MoEDeployment) {
			m.Spec.Routing.SamplePercent, m.Spec.Profiling = ptr.To[int32](0), &semmoev1.ProfilingSpec{ProfileRef: &semmoev1.ProfileReference{Name: "p"}}
		}), "", ""},
	} {
		err := ValidateRelease(test.moed, Release(test.moed, nil))
		if (err == nil) != (test.reason == "") || err != nil && (err.Reason != test.reason || !strings.Contains(err.Message, test.want)) {
			t.Errorf("%s: %+v, want %s %q", name, err, test.reason, test.want)
		}
	}
}
