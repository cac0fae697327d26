// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"maps"
	"math"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/internal/kube/podhealth"
	"github.com/semmoe/operator/internal/observation/lar"
	"github.com/semmoe/operator/internal/router"
	"github.com/semmoe/operator/test/corpus"
)

var vllmDir = flag.String("vllm", "", "virtual environment printed by test/vllm/install.sh; empty skips TestVLLM")

const (
	vllmImage = "vllm-cpu:0.32.0"
	// vllmStart limits the wait for servers to start. One server needs 60 s of CPU time, and two start at the same
	// time.
	vllmStart = 5 * time.Minute
	// vllmTextBytes is the length of a text in bytes. Drift detection needs 50 held-out requests of the profile.
	vllmTextBytes = 300
)

// TestVLLM runs vLLM 0.32.0 itself, on CPUs, as the engine of a MoEDeployment: two replicas of two expert-parallel
// ranks, with the plug-in of integrations/vllm. The engine is profiled, and counts requests, tokens and activations per
// rank. These counts are compared with the headers that the router returns to clients and with the plan's forecast.
func TestVLLM(t *testing.T) {
	if *vllmDir == "" {
		t.Skip("runs only with -args -vllm; use make e2e-vllm")
	}
	namespace := newNamespace(t)
	startManager(t, namespace, nil)
	if err := cluster.SetImages(map[string]string{vllmImage: filepath.Join(repository, "bin", "semmoe")}); err != nil {
		t.Fatal(err)
	}
	create(t, vllmDataset(t, namespace, vllmTexts().familiar))
	moed := vllmDeployment(t, namespace)
	begin := time.Now()
	lap := func(what string) {
		t.Logf("%s after %.0f s", what, time.Since(begin).Seconds())
		begin = time.Now()
	}
	create(t, moed)
	waitConditionWithin(t, vllmStart, moed, semmoev1.ConditionReady, metav1.ConditionTrue, "Serving")
	url := serviceURL(t, moed)
	eventually(t, vllmStart, "both replicas are ready", func() error { return readyPods(t, moed, 2) })
	lap("two servers are ready")
	waitConditionWithin(t, vllmStart, moed, semmoev1.ConditionRolledOut, metav1.ConditionFalse, "AwaitingApproval")
	lap("the servers are profiled")
	for _, pod := range listEnginePods(t, moed) {
		engine := engineContainer(pod)
		t.Logf("pod %s: %s", pod.Name, strings.Join(append(engine.Command, engine.Args...), " "))
	}
	before := vllmGreedy(t, url)
	without := vllmLocality(t, moed, url)

	t.Run("requests run on the reported ranks", func(t *testing.T) { vllmPins(t, moed, url) })
	t.Run("the server obeys ranks on the adapter's routes", func(t *testing.T) { vllmObeysRanks(t, get(t, moed)) })
	t.Run("routes are passed on", func(t *testing.T) { vllmPassesRoutes(t, get(t, moed), url) })
	t.Run("streams are complete", func(t *testing.T) { vllmStreams(t, url) })
	t.Run("a client that disconnects frees its rank", func(t *testing.T) { vllmAborts(t, moed, url) })
	lap("the server without a plan is tested")

	stop := send(t, url, 1, vllmPaced)
	digest := planConfigMap(t, moed).Annotations[semmoev1.AnnotationPlanDigest][:16]
	update(t, moed, func(m *semmoev1.MoEDeployment) { m.Annotations = map[string]string{semmoev1.AnnotationApprove: digest} })
	eventually(t, vllmStart, "the plan's canary is ready", func() error {
		if phase := phaseOf(get(t, moed)); phase != semmoev1.RolloutPhaseCanary && phase != semmoev1.RolloutPhasePromoting {
			return fmt.Errorf("the phase is %q", phase)
		}
		return readyByPlan(t, moed, 1)
	})
	lap("the canary is ready")
	waitConditionWithin(t, vllmStart, moed, semmoev1.ConditionRolledOut, metav1.ConditionTrue, "RolledOut", digest, "by reshuffled weights")
	eventually(t, vllmStart, "both replicas serve the plan", func() error { return readyByPlan(t, moed, 2) })
	stop()
	lap("the plan is promoted")
	eventually(t, waitTimeout, "requests are routed by the plan", func() error { return sentBy(t.Context(), url, digest) })
	if diff := cmp.Diff(before, vllmGreedy(t, url)); diff != "" {
		t.Errorf("the plan changed the answers (-before +after):\n%s", diff)
	}
	t.Run("requests run on the ranks of the plan", func(t *testing.T) { vllmPins(t, moed, url) })
	t.Run("the engines' counts match the plan's forecast", func(t *testing.T) { vllmPromise(t, moed, without, vllmLocality(t, moed, url)) })
	lap("the plan is measured")
	t.Run("drift is detected", func(t *testing.T) { vllmDetectsDrift(t, moed, url) })
	lap("drift is detected")

	t.Run("a killed server returns to service", func(t *testing.T) { vllmKilled(t, moed, url) })
	lap("a killed server is back in service")
}

// vllmDeployment serves the small checkpoint with vLLM. The image is this machine's file system: its libraries, its
// Python with the virtual environment, and the part of /sys that lscpu reads. Everything else is as in a user's
// manifest.
func vllmDeployment(t *testing.T, namespace string) *semmoev1.MoEDeployment {
	t.Helper()
	environment, err := filepath.EvalSymlinks(*vllmDir) // mounted at the same path
	if err != nil {
		t.Fatalf("-vllm: %v", err)
	}
	python := filepath.Join(environment, "bin", "python")
	output, err := exec.CommandContext(t.Context(), python, "-c", "import sys; print(sys.base_prefix)").Output()
	if err != nil {
		t.Fatalf("failed to run %s: %v", python, err)
	}
	plugin, counters := filepath.Join(repository, "test", "vllm", "plugin"), vllmPlugin(t, python)
	shared := []string{environment, plugin, counters}
	for _, directory := range []string{strings.TrimSpace(string(output)), "/usr", "/bin", "/lib", "/lib64", "/sys/devices/system"} {
		if _, err := os.Stat(directory); err == nil && !slices.Contains(shared, directory) {
			shared = append(shared, directory)
		}
	}
	template := &corev1.PodTemplateSpec{Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: semmoev1.EngineContainer}}}}
	for i, directory := range shared {
		name := "image-" + strconv.Itoa(i)
		template.Spec.Volumes = append(template.Spec.Volumes, corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{
			HostPath: &corev1.HostPathVolumeSource{Path: directory, Type: ptr.To(corev1.HostPathDirectory)},
		}})
		template.Spec.Containers[0].VolumeMounts = append(template.Spec.Containers[0].VolumeMounts, corev1.VolumeMount{Name: name, MountPath: directory, ReadOnly: true})
	}
	return newDeployment(namespace, "tiny", func(m *semmoev1.MoEDeployment) {
		m.Spec.Model.Volume.HostPath.Path = vllmCheckpoint(t)
		m.Spec.Engine = semmoev1.EngineSpec{
			Type: semmoev1.EngineVLLM, Image: vllmImage,
			// In float32 a permuted checkpoint gives the same log-probabilities to within 1.4e-5 nats.
			Args: []string{
				"--dtype=float32", "--enforce-eager", "--max-model-len=1024", "--max-num-seqs=8",
				// Start fewer processes: each takes 9 s of CPU time to start.
				"--api-server-count=1", "--distributed-executor-backend=uni",
			},
			Env: []corev1.EnvVar{
				{Name: "PATH", Value: filepath.Join(environment, "bin") + ":/usr/bin:/bin"},
				{Name: "PYTHONPATH", Value: plugin + ":" + counters},
				{Name: "HOME", Value: "/tmp"},
				{Name: "VLLM_HOST_IP", Value: "$(POD_IP)"},
				{Name: "HF_HUB_OFFLINE", Value: "1"},
				{Name: "OMP_NUM_THREADS", Value: "1"},
				{Name: "VLLM_NO_USAGE_STATS", Value: "1"},
				{Name: "VLLM_CPU_KVCACHE_SPACE", Value: "1"},         // GiB per rank
				{Name: "VLLM_CPU_OMP_THREADS_BIND", Value: "nobind"}, // some machines have no NUMA node
				{Name: "VLLM_ENABLE_V1_MULTIPROCESSING", Value: "0"}, // with 1, vLLM replaces the executor uni on CPUs
			},
		}
		m.Spec.Template = template
		m.Spec.Parallelism.ExpertParallelSize = 2
		m.Spec.Replicas = ptr.To[int32](2)
		m.Spec.Routing.SamplePercent = ptr.To[int32](100)
		m.Spec.Profiling = &semmoev1.ProfilingSpec{
			Dataset:      &semmoev1.DatasetSpec{ConfigMap: &semmoev1.DatasetConfigMap{Name: "corpus"}},
			SamplingSpec: semmoev1.SamplingSpec{Requests: 2000, Tokens: 200000, RequestTokens: 512},
		}
		m.Spec.Drift.WindowSeconds = 60
		m.Spec.Drift.MaxReplansPerDay = ptr.To[int32](0)
		m.Spec.Placement.Approval = semmoev1.ApprovalManual
	})
}

// vllmCheckpoint copies the small checkpoint and adds the files that vLLM needs for chats.
func vllmCheckpoint(t *testing.T) string {
	t.Helper()
	directory := t.TempDir()
	for _, source := range []string{checkpointDir(), filepath.Join(repository, "test", "vllm", "checkpoint")} {
		if err := os.CopyFS(directory, os.DirFS(source)); err != nil {
			t.Fatal(err)
		}
	}
	return directory
}

func engineContainer(pod corev1.Pod) corev1.Container {
	return pod.Spec.Containers[slices.IndexFunc(pod.Spec.Containers, func(c corev1.Container) bool { return c.Name == semmoev1.EngineContainer })]
}

// readyPods returns an error unless exactly the given number of engine pods exist and all are ready.
func readyPods(t *testing.T, moed *semmoev1.MoEDeployment, want int) error {
	t.Helper()
	pods := listEnginePods(t, moed)
	for _, pod := range pods {
		if !podhealth.Ready(&pod) {
			return fmt.Errorf("pod %s is not ready", pod.Name)
		}
	}
	if len(pods) != want {
		return fmt.Errorf("%d pods, want %d", len(pods), want)
	}
	return nil
}

// readyByPlan returns an error unless the given number of ready pods serve a plan. Readiness includes the lossless
// probe.
func readyByPlan(t *testing.T, moed *semmoev1.MoEDeployment, want int) error {
	t.Helper()
	ready := 0
	for _, pod := range listEnginePods(t, moed) {
		probed := slices.ContainsFunc(pod.Spec.InitContainers, func(c corev1.Container) bool { return c.Name == "prove-lossless" && c.ReadinessProbe != nil })
		if pod.Annotations[semmoev1.AnnotationPlanDigest] == "" || !podhealth.Ready(&pod) {
			continue
		}
		if !probed {
			t.Errorf("pod %s serves a plan without a lossless probe", pod.Name)
		}
		ready++
	}
	if ready != want {
		return fmt.Errorf("%d ready pods serve a plan, want %d", ready, want)
	}
	return nil
}

// vllmCorpus contains texts that fit the server: two of three texts of most kinds (familiar), the remaining texts of
// these kinds (held), and texts of kinds with different characters (strange).
type vllmCorpus struct{ familiar, held, strange []corpus.Request }

var vllmTexts = sync.OnceValue(func() (texts vllmCorpus) {
	root, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		panic(err)
	}
	fromGo, err := corpus.FromGo(strings.TrimSpace(string(root)))
	if err != nil {
		panic(err)
	}
	for n, request := range corpus.Requests(append(corpus.Written(), fromGo...), vllmTextBytes) {
		switch {
		case slices.Contains([]string{"chinese", "japanese", "russian"}, request.Kind):
			texts.strange = append(texts.strange, request)
		case n%3 != 0:
			texts.familiar = append(texts.familiar, request)
		default:
			texts.held = append(texts.held, request)
		}
	}
	return texts
})

func vllmDataset(t *testing.T, namespace string, requests []corpus.Request) *corev1.ConfigMap {
	t.Helper()
	lines, err := corpus.JSONL(requests)
	if err != nil {
		t.Fatal(err)
	}
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "corpus"}, Data: map[string]string{"dataset.jsonl": string(lines)}}
}

// vllmPlugin installs integrations/vllm into a directory, like in a user's image.
func vllmPlugin(t *testing.T, python string) string {
	t.Helper()
	source, site := t.TempDir(), t.TempDir()
	if err := os.CopyFS(source, os.DirFS(filepath.Join(repository, "integrations", "vllm"))); err != nil { // setuptools writes next to its source
		t.Fatal(err)
	}
	command := exec.CommandContext(t.Context(), python, "-m", "pip", "-q", "--disable-pip-version-check", "install", "--no-deps", "--no-build-isolation",
		"--no-index", "--target", site, source)
	if output, err := command.CombinedOutput(); err != nil {
		t.Fatalf("failed to install integrations/vllm: %v\n%s", err, output)
	}
	return site
}

func vllmPrompt(n int) string {
	texts := vllmTexts().held
	return texts[n*7%len(texts)].Text
}

// vllmPaced returns a prompt twice a second. Starting servers need the CPU time.
func vllmPaced(ctx context.Context, n int) string {
	select {
	case <-ctx.Done():
	case <-time.After(500 * time.Millisecond):
	}
	return vllmPrompt(n)
}

// vllmRoutes maps routes of vLLM to functions that return a request body.
var vllmRoutes = map[string]func(prompt string) map[string]any{
	"/v1/completions": func(prompt string) map[string]any { return map[string]any{"prompt": prompt} },
	"/v1/chat/completions": func(prompt string) map[string]any {
		return map[string]any{"messages": []map[string]string{{"role": "user", "content": prompt}}}
	},
	"/v1/messages": func(prompt string) map[string]any {
		return map[string]any{"messages": []map[string]string{{"role": "user", "content": prompt}}}
	},
	"/v1/responses": func(prompt string) map[string]any { return map[string]any{"input": prompt, "max_output_tokens": 3} },
}

// vllmAnswer contains the fields used from the answers of all routes.
type vllmAnswer struct {
	Choices []struct {
		Text string `json:"text"`
	} `json:"choices"`
	Usage struct {
		CompletionTokens int `json:"completion_tokens"`
		OutputTokens     int `json:"output_tokens"`
	} `json:"usage"`
}

// vllmPost sends a greedy request and returns the answer, and the headers of the response.
func vllmPost(ctx context.Context, url, route string, body map[string]any) (vllmAnswer, http.Header, error) {
	var answer vllmAnswer
	response, err := vllmOpen(ctx, url, route, body)
	if err != nil {
		return answer, nil, err
	}
	answer, err = readVLLM(response)
	return answer, response.Header, err
}

// readVLLM reads the answer of any route.
func readVLLM(response *http.Response) (answer vllmAnswer, err error) {
	defer response.Body.Close()
	data, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s: %s", response.Request.URL.Path, response.Status, data)
	}
	if err == nil {
		err = json.Unmarshal(data, &answer)
	}
	return answer, err
}

func vllmOpen(ctx context.Context, url, route string, body map[string]any) (*http.Response, error) {
	request, err := vllmRequest(ctx, url+route, body)
	if err != nil {
		return nil, err
	}
	return http.DefaultClient.Do(request)
}

func vllmRequest(ctx context.Context, url string, body map[string]any) (*http.Request, error) {
	whole := maps.Clone(body)
	whole["model"], whole["temperature"] = "tiny", 0
	text, err := json.Marshal(whole)
	if err != nil {
		return nil, err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(text))
	if err == nil {
		request.Header.Set("Content-Type", "application/json")
	}
	return request, err
}

// vllmGreedy returns the continuations of a few prompts.
func vllmGreedy(t *testing.T, url string) []string {
	t.Helper()
	var texts []string
	for _, prompt := range []string{"func main() {", "SELECT name, id FROM users", "der Hund und die Katze", "the history of the city"} {
		answer, _, err := vllmPost(t.Context(), url, "/v1/completions", map[string]any{"prompt": prompt, "max_tokens": 16})
		if err != nil || len(answer.Choices) != 1 {
			t.Fatalf("%+v, %v", answer, err)
		}
		texts = append(texts, answer.Choices[0].Text)
	}
	return texts
}

// vllmRank identifies a rank of a pod, as in the router's headers and the engine's metrics.
type vllmRank struct{ pod, rank string }

// vllmCount contains the counters of a rank.
type vllmCount struct{ requests, tokens, running int }

// vllmSeries matches a sample of a metric per rank. vLLM calls a data-parallel rank an engine.
var vllmSeries = regexp.MustCompile(`(?m)^vllm:(request_success_total|generation_tokens_total|num_requests_running)\{engine="(\d+)"[^}]*\} (\S+)$`)

func vllmMetrics(t *testing.T, pod corev1.Pod) string {
	t.Helper()
	response, err := podClient(t).Get(fmt.Sprintf("http://%s:%d/metrics", pod.Status.PodIP, engineContainer(pod).Ports[0].ContainerPort))
	if err != nil {
		t.Fatal(err)
	}
	text, err := io.ReadAll(response.Body)
	response.Body.Close()
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// vllmCounts reads the servers' counters of each rank.
func vllmCounts(t *testing.T, moed *semmoev1.MoEDeployment) map[vllmRank]vllmCount {
	t.Helper()
	counts := map[vllmRank]vllmCount{}
	for _, pod := range listEnginePods(t, moed) {
		for _, sample := range vllmSeries.FindAllStringSubmatch(vllmMetrics(t, pod), -1) {
			value, err := strconv.ParseFloat(sample[3], 64)
			if err != nil {
				t.Fatal(err)
			}
			at := vllmRank{pod.Name, sample[2]}
			count := counts[at]
			switch sample[1] {
			case "request_success_total": // split by reason
				count.requests += int(value)
			case "generation_tokens_total":
				count.tokens += int(value)
			case "num_requests_running":
				count.running += int(value)
			}
			counts[at] = count
		}
	}
	return counts
}

// vllmSent counts the texts of vllmPins.
var vllmSent atomic.Int64

// vllmPins sends concurrent requests on each route, and compares the ranks that the router reports with the engine's
// counters.
func vllmPins(t *testing.T, moed *semmoev1.MoEDeployment, url string) {
	const perRoute = 12
	for _, pod := range listEnginePods(t, moed) {
		vllmAnswers(t, url, pod.Name)
	}
	before := vllmCounts(t, moed)
	if len(before) != 4 {
		t.Fatalf("the engines' metrics have the ranks %v, want 2 ranks of 2 pods", before)
	}
	var mu sync.Mutex
	reported := map[vllmRank]vllmCount{}
	for _, route := range []string{"/v1/completions", "/v1/chat/completions", "/v1/messages"} {
		var clients sync.WaitGroup
		for n := range perRoute {
			clients.Go(func() {
				// Each text begins differently, because texts with a cached prefix go to the same pod again.
				body := vllmRoutes[route](fmt.Sprintf("%d. %s", vllmSent.Add(1), vllmPrompt(n)))
				body["max_tokens"] = 3 + n%3
				answer, header, err := vllmPost(t.Context(), url, route, body)
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				defer mu.Unlock()
				at := vllmRank{header.Get(router.HeaderPod), header.Get(router.HeaderRank)}
				count := reported[at]
				count.requests++
				count.tokens += answer.Usage.CompletionTokens + answer.Usage.OutputTokens
				reported[at] = count
			})
		}
		clients.Wait()
	}
	if len(reported) < 3 {
		t.Errorf("requests are reported only on the ranks %v, so a server that ignores ranks would not be detected", reported)
	}
	t.Logf("requests per reported rank: %v", reported)
	eventually(t, 10*time.Second, "the engines' counts per rank match the router's reports", func() error {
		counted := map[vllmRank]vllmCount{}
		for at, count := range vllmCounts(t, moed) {
			count.requests, count.tokens = count.requests-before[at].requests, count.tokens-before[at].tokens
			if count.requests != 0 {
				counted[at] = vllmCount{requests: count.requests, tokens: count.tokens}
			}
		}
		if diff := cmp.Diff(reported, counted, cmp.AllowUnexported(vllmRank{}, vllmCount{})); diff != "" {
			return fmt.Errorf("(-reported +counted):\n%s", diff)
		}
		return nil
	})
	// vLLM chooses the rank on this route, so the router reports none. The router does not support stored responses.
	for n := range 4 {
		_, header, err := vllmPost(t.Context(), url, "/v1/responses", vllmRoutes["/v1/responses"](vllmPrompt(n)))
		if err != nil || header.Get(router.HeaderPod) == "" || header.Get(router.HeaderRank) != "" {
			t.Errorf("/v1/responses: pod %q, rank %q, %v", header.Get(router.HeaderPod), header.Get(router.HeaderRank), err)
		}
	}
	response, err := http.Get(url + "/v1/responses/resp_1")
	if err != nil {
		t.Fatal(err)
	}
	response.Body.Close()
	if response.StatusCode != http.StatusNotFound {
		t.Errorf("reading a response that no server stores returned %s", response.Status)
	}
}

// vllmPassedRoutes are requests, as method, path and body, that the router passes on. The answer of a server depends on
// the model and on its flags.
var vllmPassedRoutes = [][3]string{
	{"POST", "/v1/chat/completions/batch", `{"model":"tiny","messages":[[{"role":"user","content":"a"}],[{"role":"user","content":"b"}]],"max_tokens":2}`},
	{"POST", "/inference/v1/generate", `{"model":"tiny","token_ids":[5,6,7],"sampling_params":{"max_tokens":2}}`},
	{"POST", "/invocations", `{"model":"tiny","prompt":"a","max_tokens":2}`},
	{"POST", "/v1/completions?x=1", `{"model":"tiny","prompt":"a","max_tokens":2}`},
	{"POST", "/v1/completions/", `{"model":"tiny","prompt":"a","max_tokens":2}`},
	{"POST", "/v1/completions/render", `{"model":"tiny","prompt":"a"}`},
	{"POST", "/v1/messages/count_tokens", `{"model":"tiny","messages":[{"role":"user","content":"a"}]}`},
	{"POST", "/tokenize", `{"model":"tiny","prompt":"a"}`},
	{"POST", "/detokenize", `{"model":"tiny","tokens":[5]}`},
	{"POST", "/generative_scoring", `{"model":"tiny","query":"a","items":["b"],"label_token_ids":[5,6]}`},
	{"POST", "/v1/embeddings", `{"model":"tiny","input":"a"}`},
	{"POST", "/v1/score", `{"model":"tiny","text_1":"a","text_2":"b"}`},
	{"POST", "/rerank", `{"model":"tiny","query":"a","documents":["b"]}`},
	{"POST", "/v1/responses", `{"model":"tiny","input":"a","previous_response_id":"resp_1"}`},
	{"POST", "/v1/responses/resp_1/cancel", ""},
	{"DELETE", "/v1/responses/resp_1", ""},
	{"PUT", "/v1/rerank", `{}`},
	{"OPTIONS", "/v1/completions", ""},
}

// vllmPassesRoutes compares the answers of the server with those through the router: status, type and CORS headers.
func vllmPassesRoutes(t *testing.T, moed *semmoev1.MoEDeployment, url string) {
	pod, pods := listEnginePods(t, moed)[0], podClient(t)
	direct := fmt.Sprintf("http://%s:%d", pod.Status.PodIP, moed.Spec.Engine.Port)
	ask := func(client *http.Client, base string, request [3]string) string {
		t.Helper()
		r, err := http.NewRequestWithContext(t.Context(), request[0], base+request[1], strings.NewReader(request[2]))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Content-Type", "application/json")
		r.Header.Set("Origin", "http://page.example")
		r.Header.Set("Access-Control-Request-Method", "POST")
		once := *client
		once.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
		response, err := once.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		defer response.Body.Close()
		return fmt.Sprint(response.StatusCode, " ", response.Header.Get("Content-Type"), " ", response.Header.Get("Access-Control-Allow-Origin"))
	}
	for _, request := range vllmPassedRoutes {
		if want, got := ask(pods, direct, request), ask(http.DefaultClient, url, request); got != want {
			t.Errorf("%s %s: %s through the router, %s directly", request[0], request[1], got, want)
		}
	}
}

// vllmActivations matches the counters of the plug-in.
var vllmActivations = regexp.MustCompile(`(?m)^semmoe_engine_activations_total\{[^}]*locality="(local|remote)"[^}]*\} (\S+)$`)

// vllmLocality sends texts that were not profiled through the router, and returns the local activation rate that the
// engines count in this time.
func vllmLocality(t *testing.T, moed *semmoev1.MoEDeployment, url string) lar.Activations {
	t.Helper()
	read := func() (sum lar.Activations) {
		for _, pod := range listEnginePods(t, moed) {
			for _, sample := range vllmActivations.FindAllStringSubmatch(vllmMetrics(t, pod), -1) {
				value, err := strconv.ParseFloat(sample[2], 64)
				if err != nil {
					t.Fatal(err)
				}
				sum.Total += int64(value)
				if sample[1] == "local" {
					sum.Local += int64(value)
				}
			}
		}
		return sum
	}
	before := read()
	var next atomic.Int64
	var clients sync.WaitGroup
	texts := vllmTexts().held
	for range 4 { // one client per rank: no request waits for another
		clients.Go(func() {
			for n := int(next.Add(1)) - 1; n < len(texts); n = int(next.Add(1)) - 1 {
				if _, _, err := vllmPost(t.Context(), url, "/v1/completions", map[string]any{"prompt": texts[n].Text, "max_tokens": 2}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	clients.Wait()
	after := read()
	counted := lar.Activations{Local: after.Local - before.Local, Total: after.Total - before.Total}
	t.Logf("the engines count %d local activations of %d: %.4f, in %d requests", counted.Local, counted.Total, counted.Rate(), len(texts))
	return counted
}

// vllmPromise compares the engines' counts with the plan's forecast.
func vllmPromise(t *testing.T, moed *semmoev1.MoEDeployment, without, with lar.Activations) {
	status := get(t, moed).Status.LAR
	if status == nil || status.PredictedMilli == nil || status.BaselineMilli == nil {
		t.Fatalf("status.lar is %+v", status)
	}
	forecast, baseline := float64(*status.PredictedMilli)/1000, float64(*status.BaselineMilli)/1000
	t.Logf("forecast local activation rate: %.3f with the plan, %.3f without", forecast, baseline)
	if math.Abs(without.Rate()/baseline-1) > 0.03 || math.Abs(with.Rate()/forecast-1) > 0.03 {
		t.Errorf("the engines count %.4f without the plan and %.4f with it, want %.3f and %.3f within 3%%", without.Rate(), with.Rate(), baseline, forecast)
	}
	waitLocality(t, moed, metav1.ConditionTrue, "OnTarget")
}

// vllmDetectsDrift sends texts of kinds that were not profiled until drift is detected.
func vllmDetectsDrift(t *testing.T, moed *semmoev1.MoEDeployment, url string) {
	texts := vllmTexts().strange
	stop := send(t, url, 4, func(_ context.Context, n int) string { return texts[n%len(texts)].Text })
	defer stop()
	waitLocality(t, moed, metav1.ConditionFalse, "Drifted")
	eventually(t, waitTimeout, "the observed rate comes from the engines", func() error {
		if status := get(t, moed).Status.LAR; status.Source != semmoev1.LARSourceEngine || status.ObservedMilli == nil || *status.ObservedMilli >= *status.PredictedMilli {
			return fmt.Errorf("status.lar is %+v", status)
		}
		return nil
	})
}

// vllmObeysRanks sends requests for the last rank directly to a server, and compares its counters with the adapter's
// table of routes.
func vllmObeysRanks(t *testing.T, moed *semmoev1.MoEDeployment) {
	const sent = 8
	pod := listEnginePods(t, moed)[0]
	adapter, err := registry.For(string(semmoev1.EngineVLLM))
	if err != nil {
		t.Fatal(err)
	}
	pods := podClient(t)
	for _, route := range slices.Sorted(maps.Keys(vllmRoutes)) {
		before := vllmCounts(t, moed)
		var clients sync.WaitGroup
		for n := range sent {
			clients.Go(func() {
				body := vllmRoutes[route](vllmPrompt(n))
				if body["max_output_tokens"] == nil {
					body["max_tokens"] = 3
				}
				request, err := vllmRequest(t.Context(), fmt.Sprintf("http://%s:%d%s", pod.Status.PodIP, moed.Spec.Engine.Port, route), body)
				if err != nil {
					t.Error(err)
					return
				}
				request.Header.Set(adapter.RankHeader, "1")
				response, err := pods.Do(request)
				if err == nil {
					_, err = readVLLM(response)
				}
				if err != nil {
					t.Error(err)
				}
			})
		}
		clients.Wait()
		pinned := slices.ContainsFunc(adapter.Routes, func(r engine.Route) bool {
			return r.Path == route && r.Pin == engine.ByHeader && r.First.Compare(engine.ParseRelease(strings.TrimPrefix(vllmImage, "vllm-cpu:"))) <= 0
		})
		eventually(t, 10*time.Second, fmt.Sprintf("%s: pinned %t", route, pinned), func() error {
			after := vllmCounts(t, moed)
			first, last := vllmRank{pod.Name, "0"}, vllmRank{pod.Name, "1"}
			onFirst, onLast := after[first].requests-before[first].requests, after[last].requests-before[last].requests
			if onFirst+onLast != sent || pinned != (onFirst == 0) {
				return fmt.Errorf("%d requests on rank 0, %d on rank 1", onFirst, onLast)
			}
			return nil
		})
	}
}

// vllmEvents calls a function with the data of each event of a stream, until it returns false.
func vllmEvents(body io.Reader, each func(data string) bool) error {
	lines := bufio.NewScanner(body)
	for lines.Scan() {
		if data, ok := strings.CutPrefix(lines.Text(), "data: "); ok && !each(data) {
			return nil
		}
	}
	return lines.Err()
}

// vllmStreams compares a streamed answer with the same answer in one piece.
func vllmStreams(t *testing.T, url string) {
	body := map[string]any{"prompt": "func main() {", "max_tokens": 24}
	whole, _, err := vllmPost(t.Context(), url, "/v1/completions", body)
	if err != nil {
		t.Fatal(err)
	}
	body["stream"] = true
	response, err := vllmOpen(t.Context(), url, "/v1/completions", body)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	if rank := response.Header.Get(router.HeaderRank); response.StatusCode != http.StatusOK || rank == "" {
		t.Errorf("%s on rank %q", response.Status, rank)
	}
	text, events, last := "", 0, ""
	if err := vllmEvents(response.Body, func(data string) bool {
		last = data
		var piece vllmAnswer
		if data != "[DONE]" {
			events++
			if err := json.Unmarshal([]byte(data), &piece); err != nil {
				t.Errorf("%s: %v", data, err)
			}
		}
		for _, choice := range piece.Choices {
			text += choice.Text
		}
		return true
	}); err != nil {
		t.Fatal(err)
	}
	if last != "[DONE]" || events < 5 || text != whole.Choices[0].Text {
		t.Errorf("%d events, the last is %s: %q, want %q", events, last, text, whole.Choices[0].Text)
	}
}

// vllmAborts closes a long stream after its first token.
func vllmAborts(t *testing.T, moed *semmoev1.MoEDeployment, url string) {
	const longest = 900
	before := vllmCounts(t, moed)
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	response, err := vllmOpen(ctx, url, "/v1/completions", map[string]any{"prompt": "func main() {", "max_tokens": longest, "ignore_eos": true, "stream": true})
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	at := vllmRank{response.Header.Get(router.HeaderPod), response.Header.Get(router.HeaderRank)}
	if err := vllmEvents(response.Body, func(string) bool { return false }); err != nil {
		t.Fatal(err)
	}
	eventually(t, 10*time.Second, "the rank runs the request", func() error {
		if running := vllmCounts(t, moed)[at].running; running != 1 {
			return fmt.Errorf("rank %v runs %d requests", at, running)
		}
		return nil
	})
	leave()
	var after map[vllmRank]vllmCount
	eventually(t, 10*time.Second, "no rank runs a request", func() error {
		after = vllmCounts(t, moed)
		for at, count := range after {
			if count.running != 0 {
				return fmt.Errorf("rank %v runs %d requests", at, count.running)
			}
		}
		return nil
	})
	if tokens := after[at].tokens - before[at].tokens; tokens < 1 || tokens >= longest {
		t.Errorf("rank %v generated %d of %d tokens for a client that disconnected after the first token", at, tokens, longest)
	}
}

// vllmKilled kills one of two servers under traffic. Requests in flight may fail. Later requests are answered by the
// other server, and the killed server returns to service.
func vllmKilled(t *testing.T, moed *semmoev1.MoEDeployment, url string) {
	pod := listEnginePods(t, moed)[0]
	number := process(t, func(args []string) bool {
		line := strings.Join(args, " ") // a process that has set its title has one argument
		return strings.Contains(line, "/vllm serve ") && strings.Contains(line, " --host "+pod.Status.PodIP+" ")
	})
	if number == 0 {
		t.Fatalf("the server process of pod %s is not found", pod.Name)
	}
	if err := syscall.Kill(number, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, 30*time.Second, "requests are answered by the other server", func() error { return sendRequest(t.Context(), url, "tiny") })
	for range 8 {
		if err := sendRequest(t.Context(), url, "tiny"); err != nil {
			t.Errorf("a request failed after the other server had answered: %v", err)
		}
	}
	eventually(t, vllmStart, "the killed server is ready again", func() error {
		for _, again := range listEnginePods(t, moed) {
			if again.UID == pod.UID && (again.Status.ContainerStatuses[0].RestartCount != 1 || !podhealth.Ready(&again)) {
				return fmt.Errorf("pod %s: %+v", pod.Name, again.Status.ContainerStatuses[0])
			}
		}
		return readyByPlan(t, moed, 2)
	})
	vllmAnswers(t, url, pod.Name)
}

// vllmAnswers sends requests until a pod answers one: the router discovers a ready pod later than this test.
func vllmAnswers(t *testing.T, url, pod string) {
	t.Helper()
	eventually(t, waitTimeout, "pod "+pod+" answers requests", func() error {
		_, header, err := vllmPost(t.Context(), url, "/v1/completions", map[string]any{"prompt": "x", "max_tokens": 1})
		if err != nil {
			return err
		}
		if served := header.Get(router.HeaderPod); served != pod {
			return fmt.Errorf("pod %s answered", served)
		}
		return nil
	})
}
