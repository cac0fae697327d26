// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	processingv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/solver/dispatch"
)

// peerPicker is the name of the compared endpoint picker in the output, peerPickerProgram that of its program.
const (
	peerPicker        = "llm-d-router"
	peerPickerProgram = "epp"
)

// gatewayChunkBytes is the size of the pieces in which the simulated gateway sends a body.
const gatewayChunkBytes = 16 << 10

// pickerResult compares the endpoint picker with that of llm-d-router in the same run: both get the same requests one
// after another, in rounds, as a gateway sends them.
type pickerResult struct {
	// Missing names the programs that are not installed.
	Missing  []string       `json:"missing,omitempty"`
	ByTokens []pickerLength `json:"by_prompt_tokens"`
}

type pickerLength struct {
	Tokens  int           `json:"tokens"`
	Pickers []pickerCosts `json:"pickers"`
}

// pickerCosts are the costs of a picker with prompts of one length, four requests at a time.
type pickerCosts struct {
	Name string `json:"name"`
	// Latency is the median time from the first message of a request to the answer to its last one. CPU is the
	// processor time per request. The ratios to llm-d-router are medians over rounds.
	Latency        float64 `json:"p50_ms"`
	CPU            float64 `json:"cpu_us_per_request"`
	LatencyToLLMD  float64 `json:"p50_to_llm_d,omitempty"`
	CPUToLLMD      float64 `json:"cpu_to_llm_d,omitempty"`
	ResidentMemory float64 `json:"resident_mib"`
}

// benchPickers measures prompts of the lengths in only, or of all sideLengths.
func benchPickers(ctx context.Context, only []string) (*pickerResult, error) {
	texts, tokenizer, err := realText()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "bench-pickers-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	engine, err := startProcess(ctx, engineProcess)
	if err != nil {
		return nil, err
	}
	defer engine.stop() //nolint:errcheck // its measurements are complete
	_, port, err := net.SplitHostPort(engine.address)
	if err != nil {
		return nil, err
	}
	r := &pickerResult{}
	pickers, err := r.startAll(ctx, dir, port, tokenizer)
	defer func() {
		for _, p := range pickers {
			p.stop() //nolint:errcheck // its measurements are complete
		}
	}()
	if err != nil {
		return nil, err
	}
	for _, length := range sideLengths {
		if len(only) > 0 && !slices.Contains(only, strconv.Itoa(length.tokens)) {
			continue
		}
		costs, err := comparePickers(ctx, pickers, texts, length.tokens, length.requests)
		if err != nil {
			return nil, err
		}
		r.ByTokens = append(r.ByTokens, pickerLength{length.tokens, costs})
	}
	return r, nil
}

// startAll starts the endpoint picker with and without a plan, and that of llm-d-router if it is installed.
func (r *pickerResult) startAll(ctx context.Context, dir, port string, tokenizer []byte) (pickers []named, err error) {
	artifact, err := plan.Encode(routerPlan(sideRanks))
	if err != nil {
		return nil, err
	}
	for _, mode := range []struct {
		name, digest string
		policy       dispatch.Policy
	}{{"endpoint picker, with a plan", artifact.Digest, dispatch.Price}, {"endpoint picker, round-robin", "", dispatch.RoundRobin}} {
		snapshot := filepath.Join(dir, string(mode.policy))
		if err := writeSnapshot(snapshot, artifact, tokenizer, port, sidePods, sideRanks, mode.digest); err != nil {
			return pickers, err
		}
		started, err := startProcess(ctx, pickerProcess, snapshot, string(mode.policy))
		if err != nil {
			return pickers, err
		}
		pickers = append(pickers, named{mode.name, started})
	}
	program, err := exec.LookPath(peerPickerProgram)
	if err != nil {
		r.Missing = append(r.Missing, peerPicker)
		return pickers, nil
	}
	peer, err := startPeerPicker(ctx, program, dir, port)
	if err != nil {
		return pickers, err
	}
	return append(pickers, named{peerPicker, peer}), nil
}

// startPeerPicker starts the endpoint picker of llm-d-router without Kubernetes, with its scorers of prefixes, queues and
// caches (docs/discovery.md of llm-d-router, August 2026).
func startPeerPicker(ctx context.Context, program, dir, port string) (*process, error) {
	var endpoints strings.Builder
	for pod := range sidePods {
		fmt.Fprintf(&endpoints, "- {name: engine-%d, address: %q, port: %q}\n", pod, podAddress(pod), port)
	}
	list, config := filepath.Join(dir, "endpoints.yaml"), filepath.Join(dir, "picker.yaml")
	if err := os.WriteFile(list, []byte("endpoints:\n"+endpoints.String()), 0o644); err != nil {
		return nil, err
	}
	if err := os.WriteFile(config, fmt.Appendf(nil, `
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {name: endpoints, type: file-discovery, parameters: {path: %q}}
- type: approx-prefix-cache-producer
- type: prefix-cache-scorer
- type: queue-scorer
- type: kv-cache-utilization-scorer
- type: max-score-picker
- type: single-profile-handler
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: prefix-cache-scorer, weight: 3}
  - {pluginRef: queue-scorer, weight: 2}
  - {pluginRef: kv-cache-utilization-scorer, weight: 2}
  - pluginRef: max-score-picker
dataLayer:
  discovery: {pluginRef: endpoints}
`, list), 0o644); err != nil {
		return nil, err
	}
	ports, err := freePorts(3)
	if err != nil {
		return nil, err
	}
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		return nil, err
	}
	defer log.Close()
	started := &process{address: fmt.Sprintf("127.0.0.1:%d", ports[0]), command: exec.CommandContext(ctx, program,
		"--pool-name=bench", "--pool-namespace=bench", "--config-file="+config, "--tracing=false",
		fmt.Sprintf("--grpc-port=%d", ports[0]), fmt.Sprintf("--grpc-health-port=%d", ports[1]), fmt.Sprintf("--metrics-port=%d", ports[2]))}
	started.command.Stdout, started.command.Stderr = log, log
	return started, started.command.Start()
}

// comparePickers sends the same requests to each picker, in rounds.
func comparePickers(ctx context.Context, pickers []named, texts *realTexts, tokens, requests int) ([]pickerCosts, error) {
	gateways := map[string]*gateway{}
	for _, p := range pickers {
		g, err := dialPicker(p.address)
		if err != nil {
			return nil, err
		}
		defer g.connection.Close()
		if err := g.await(ctx, texts.body(0, 0, 10, false)); err != nil {
			return nil, fmt.Errorf("%s does not serve: %w", p.name, err)
		}
		gateways[p.name] = g
	}
	latency, used := map[string][]float64{}, map[string][]float64{}
	for round := range sideRounds + 1 { // the first round warms up
		bodies := texts.bodies(uint64(round+1), requests, tokens, false)
		for _, p := range pickers {
			before, err := treeUsage(p.command.Process.Pid)
			if err != nil {
				return nil, err
			}
			times, err := gateways[p.name].sendAll(ctx, bodies, 4)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", p.name, err)
			}
			after, err := treeUsage(p.command.Process.Pid)
			if err != nil {
				return nil, err
			}
			latency[p.name] = append(latency[p.name], 1e3*quantile(times, 0.5))
			used[p.name] = append(used[p.name], 1e6*(after.CPUSeconds-before.CPUSeconds)/float64(len(bodies)))
		}
	}
	var all []pickerCosts
	for _, p := range pickers {
		memory, err := treeUsage(p.command.Process.Pid)
		if err != nil {
			return nil, err
		}
		all = append(all, pickerCosts{
			Name: p.name, Latency: quantile(latency[p.name][1:], 0.5), CPU: quantile(used[p.name][1:], 0.5),
			LatencyToLLMD: medianRatio(latency[p.name], latency[peerPicker]), CPUToLLMD: medianRatio(used[p.name], used[peerPicker]),
			ResidentMemory: memory.ResidentMiB,
		})
		fmt.Fprintf(os.Stderr, "bench: %d tokens: %+v\n", tokens, all[len(all)-1])
	}
	return all, nil
}

// gateway sends requests to an endpoint picker as Envoy does with the body modes of the endpoint picker protocol.
type gateway struct {
	connection *grpc.ClientConn
	client     extprocv3.ExternalProcessorClient
}

func dialPicker(address string) (*gateway, error) {
	connection, err := grpc.NewClient("dns:///"+address, grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{InsecureSkipVerify: true})))
	if err != nil {
		return nil, err
	}
	return &gateway{connection, extprocv3.NewExternalProcessorClient(connection)}, nil
}

// await waits until the picker answers a request with an endpoint.
func (g *gateway) await(ctx context.Context, body []byte) (err error) {
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(100 * time.Millisecond) {
		if _, err = g.send(ctx, body); err == nil {
			return nil
		}
	}
	return err
}

// sendAll sends requests, several at a time, and returns the times in seconds that the picker took.
func (g *gateway) sendAll(ctx context.Context, bodies [][]byte, atATime int) ([]float64, error) {
	times := make([]float64, len(bodies))
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(atATime)
	for i, body := range bodies {
		group.Go(func() error {
			took, err := g.send(ctx, body)
			times[i] = took.Seconds()
			return err
		})
	}
	return times, group.Wait()
}

// send sends one request and its response. It returns the time from the first message to the answer to the last message
// of the request.
func (g *gateway) send(ctx context.Context, body []byte) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	stream, err := g.client.Process(ctx)
	if err != nil {
		return 0, err
	}
	begin := time.Now()
	if err := sendRequest(stream, body); err != nil {
		return 0, err
	}
	picked := false
	if err := receiveUntil(stream, func(m *extprocv3.ProcessingResponse) bool {
		if m.GetRequestHeaders() != nil {
			picked = slices.ContainsFunc(m.GetRequestHeaders().GetResponse().GetHeaderMutation().GetSetHeaders(), func(h *corev3.HeaderValueOption) bool {
				return h.GetHeader().GetKey() == "x-gateway-destination-endpoint"
			})
		}
		return m.GetRequestBody().GetResponse().GetBodyMutation().GetStreamedResponse().GetEndOfStream()
	}); err != nil {
		return 0, err
	}
	took := time.Since(begin)
	if !picked {
		return 0, errors.New("the picker named no endpoint")
	}
	return took, sendResponse(stream)
}

// sendRequest sends the header and the body of a completion request.
func sendRequest(stream extprocv3.ExternalProcessor_ProcessClient, body []byte) error {
	if err := stream.Send(&extprocv3.ProcessingRequest{
		ProtocolConfig: &extprocv3.ProtocolConfiguration{
			RequestBodyMode:  processingv3.ProcessingMode_FULL_DUPLEX_STREAMED,
			ResponseBodyMode: processingv3.ProcessingMode_FULL_DUPLEX_STREAMED,
		},
		Request: &extprocv3.ProcessingRequest_RequestHeaders{RequestHeaders: &extprocv3.HttpHeaders{Headers: headers(
			":method", "POST", ":path", "/v1/completions", "content-type", "application/json", "content-length", strconv.Itoa(len(body)),
		)}},
	}); err != nil {
		return err
	}
	for rest := body; ; {
		n := min(len(rest), gatewayChunkBytes)
		end := n == len(rest)
		if err := stream.Send(&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestBody{RequestBody: &extprocv3.HttpBody{Body: rest[:n], EndOfStream: end}}}); err != nil || end {
			return err
		}
		rest = rest[n:]
	}
}

// sendResponse sends the response of an engine, and waits for the answers and the end of the stream.
func sendResponse(stream extprocv3.ExternalProcessor_ProcessClient) error {
	const answer = `{"id":"cmpl-1","object":"text_completion","model":"bench","choices":[{"index":0,"text":" a","finish_reason":"length"}],` +
		`"usage":{"prompt_tokens":1000,"completion_tokens":1,"total_tokens":1001}}`
	if err := stream.Send(&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_ResponseHeaders{ResponseHeaders: &extprocv3.HttpHeaders{
		Headers: headers(":status", "200", "content-type", "application/json"),
	}}}); err != nil {
		return err
	}
	if err := stream.Send(&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_ResponseBody{ResponseBody: &extprocv3.HttpBody{Body: []byte(answer), EndOfStream: true}}}); err != nil {
		return err
	}
	if err := receiveUntil(stream, func(m *extprocv3.ProcessingResponse) bool {
		return m.GetResponseBody().GetResponse().GetBodyMutation().GetStreamedResponse().GetEndOfStream()
	}); err != nil {
		return err
	}
	if err := stream.CloseSend(); err != nil {
		return err
	}
	if _, err := stream.Recv(); err != io.EOF {
		return fmt.Errorf("the stream of a request ended with %w", err)
	}
	return nil
}

// receiveUntil receives messages up to the last one.
func receiveUntil(stream extprocv3.ExternalProcessor_ProcessClient, last func(*extprocv3.ProcessingResponse) bool) error {
	for {
		message, err := stream.Recv()
		if err != nil {
			return err
		}
		if refused := message.GetImmediateResponse(); refused != nil {
			return fmt.Errorf("the picker answered %v: %s", refused.GetStatus().GetCode(), refused.GetBody())
		}
		if last(message) {
			return nil
		}
	}
}

// headers returns header fields from names and values.
func headers(pairs ...string) *corev3.HeaderMap {
	m := &corev3.HeaderMap{}
	for pair := range slices.Chunk(pairs, 2) {
		m.Headers = append(m.Headers, &corev3.HeaderValue{Key: pair[0], RawValue: []byte(pair[1])})
	}
	return m
}
