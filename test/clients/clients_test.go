// SPDX-License-Identifier: Apache-2.0

package clients

import (
	"bufio"
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/semmoe/operator/internal/router"
	"github.com/semmoe/operator/internal/router/plans/planstest"
	"github.com/semmoe/operator/test/ports"
	"github.com/semmoe/operator/test/tier"
)

var vllmDir = flag.String("vllm", "", "virtual environment printed by test/vllm/install.sh; empty skips TestClientsOfVLLM")

// vllmStart is the maximum start time of vLLM on an idle machine.
const vllmStart = 5 * time.Minute

// cell is the result of a scenario with a client.
type cell struct {
	Client   string   `json:"client"`
	Scenario string   `json:"scenario"`
	Value    any      `json:"value"`
	Error    *failure `json:"error"`
}

// failure is an exception of a client.
type failure struct {
	Class string `json:"class"`
	// Status is the status of the HTTP response; 0 if the exception has none.
	Status  int    `json:"status"`
	Message string `json:"message"`
}

// aborted is the scenario in which a client leaves during a stream.
const aborted = "abort"

// expectation is what a server must answer, apart from answering the same through the router.
type expectation struct {
	// refused maps scenarios to the status of the error. All other scenarios must succeed.
	refused map[string]int
	// aborts selects the series that counts requests whose client left; nil if the engine does not count them.
	aborts []string
	// free lists scenarios with any outcome that is the same through the router: the model or the engine decides it.
	free []string
}

// refusals are the scenarios that every engine refuses.
func refusals(more map[string]int) map[string]int {
	all := map[string]int{
		"wrong key": http.StatusUnauthorized, "too long": http.StatusBadRequest, "answer too long": http.StatusBadRequest, "wrong type": http.StatusBadRequest,
		"embeddings": http.StatusNotFound,
	}
	maps.Copy(all, more)
	return all
}

// lacking are the scenarios that the reference engine refuses, because it does not support them.
func lacking(more map[string]int) map[string]int {
	for _, scenario := range []string{"tools", "JSON schema", "parse", "n", "chat logprobs"} {
		more[scenario] = http.StatusBadRequest
	}
	return refusals(more)
}

// TestClients runs the scenarios of clients.py and clients.mjs against a reference engine with the API of a release, and
// through the router that serves two such engines under a plan and samples every request. Each client must get the same
// in both cases. The table of clients and scenarios is logged.
func TestClients(t *testing.T) {
	tier.Nightly(t)
	directory := install(t)
	planned, _ := planstest.Solved(t)
	for dialect, test := range map[string]struct {
		engine string
		expectation
	}{
		"sglang-0.5.23": {"SGLang", expectation{refused: lacking(map[string]int{}), aborts: []string{"sglang:num_aborted_requests_total{"}}},
		"vllm-0.32.0": {"VLLM", expectation{
			refused: lacking(map[string]int{"wrong model": http.StatusNotFound}), aborts: []string{"vllm:request_success_total{", `finished_reason="abort"`},
		}},
	} {
		t.Run(dialect, func(t *testing.T) {
			flags := []string{"--dialect", dialect, "--api-key", key, "--enable-metrics"}
			first, second, slow := engine(t, flags...), engine(t, flags...), slowEngine(t, flags...)
			sampled := func(o *router.Options) { o.SamplePercent = 100 }
			digest := planned.Artifact.Digest
			routed, _ := route(t, test.engine, backends(digest, ranks, first, second), sampled)
			slowly, _ := route(t, test.engine, backends(digest, ranks, slow), sampled)
			compare(t, directory, test.expectation, server{"http://" + first, "http://" + slow}, server{routed.url, slowly.url}, "http://"+slow+"/metrics")
			if share := metric(t, routed.metrics, "semmoe_router_requests_total{", `code="200"`); share == 0 {
				t.Error("no request went through the router")
			}
		})
	}
}

// TestClientsOfVLLM runs the scenarios against vLLM itself.
func TestClientsOfVLLM(t *testing.T) {
	if *vllmDir == "" {
		t.Skip("runs only with -args -vllm; use make e2e-vllm")
	}
	directory := install(t)
	port := ports.Reserve(t)
	url := fmt.Sprintf("http://127.0.0.1:%d", port)
	serve := exec.Command("../vllm/serve.sh", strconv.Itoa(port), "--api-server-count=1", "--api-key", key,
		"--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--structured-outputs-config", `{"backend": "xgrammar", "disable_any_whitespace": true}`)
	serve.Env = append(os.Environ(), "SEMMOE_VLLM_DIR="+*vllmDir)
	start(t, vllmStart, url+"/health", serve)
	routed, _ := route(t, "VLLM", backends("", 2, strings.TrimPrefix(url, "http://")), nil)
	compare(t, directory, expectation{
		// vLLM refuses several answers without sampling.
		refused: refusals(map[string]int{"wrong model": http.StatusNotFound, "n": http.StatusBadRequest}),
		// The model calls tools with arguments that are not objects, and litellm does not know vLLM's words for an answer
		// that is too long. vLLM does not count requests whose client left (abort_requests in
		// v1/engine/output_processor.py); TestVLLM checks that they end.
		free: []string{"tools", "answer too long"},
	}, server{url, url}, server{routed.url, routed.url}, url+"/metrics")
}

// server is the URL of a server. Scenarios that must last long use the URL slow.
type server struct{ url, slow string }

// compare runs all scenarios against the engine and through the router, logs the table of both, and fails if a cell
// differs or is not as expected. metrics is the page on which the engine counts the requests whose client left.
func compare(t *testing.T, directory string, want expectation, direct, routed server, metrics string) {
	t.Helper()
	all := map[string][2]map[string]cell{}
	for _, program := range []string{"clients.py", "clients.mjs"} {
		var results [2]map[string]cell
		for i, s := range []server{direct, routed} {
			before := metric(t, metrics, want.aborts...)
			results[i] = runProgram(t, directory, program, s)
			left := 0
			for name := range results[i] {
				if strings.HasPrefix(name, aborted+"\x00") {
					left++
				}
			}
			if left == 0 {
				t.Errorf("%s: no client left during a stream", program)
			}
			if want.aborts == nil {
				continue
			}
			waitFor(t, startTimeout, fmt.Sprintf("the engine aborts the %d requests whose client left", left), func() error {
				if counted := metric(t, metrics, want.aborts...) - before; counted != float64(left) {
					return fmt.Errorf("%v requests were aborted", counted)
				}
				return nil
			})
		}
		all[program] = results
	}
	t.Logf("clients and scenarios (=: as the engine without the router; a number: the status of the same refusal):\n%s", table(t, want, all))
}

// runProgram runs a program with clients, and returns its cells by scenario and client.
func runProgram(t *testing.T, directory, program string, s server) map[string]cell {
	t.Helper()
	var command *exec.Cmd
	switch filepath.Ext(program) {
	case ".py":
		command = exec.CommandContext(t.Context(), filepath.Join(directory, "bin", "python"), program, s.url, key, s.slow)
	default: // modules are resolved next to the program
		text, err := os.ReadFile(program)
		if err == nil {
			err = os.WriteFile(filepath.Join(directory, program), text, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
		command = exec.CommandContext(t.Context(), "node", filepath.Join(directory, program), s.url, key, s.slow)
	}
	var stdout, stderr bytes.Buffer
	command.Stdout, command.Stderr = &stdout, &stderr
	if err := command.Run(); err != nil {
		t.Fatalf("%s: %v\n%s", program, err, stderr.Bytes())
	}
	cells := map[string]cell{}
	lines := bufio.NewScanner(&stdout)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var c cell
		if err := json.Unmarshal(lines.Bytes(), &c); err != nil {
			t.Fatalf("%s printed %q: %v", program, lines.Text(), err)
		}
		cells[c.Scenario+"\x00"+c.Client] = c
	}
	if err := lines.Err(); err != nil {
		t.Fatal(err)
	}
	return cells
}

// table returns a line for each scenario and a column for each client. It fails the test for cells that differ, and for
// cells that are not as expected.
func table(t *testing.T, want expectation, programs map[string][2]map[string]cell) string {
	t.Helper()
	shown, clients, scenarios := map[string]string{}, map[string]bool{}, map[string]bool{}
	for _, results := range programs {
		direct, routed := results[0], results[1]
		for name, d := range direct {
			clients[d.Client], scenarios[d.Scenario] = true, true
			r, ok := routed[name]
			delete(routed, name)
			switch {
			case !ok || !same(d, r):
				shown[name] = "DIFFERS"
				t.Errorf("%s, %s differs:\ndirect: %s\nrouter: %s", d.Client, d.Scenario, text(d), text(r))
			case d.Error == nil:
				shown[name] = "="
			default:
				shown[name] = strconv.Itoa(d.Error.Status)
			}
			if slices.Contains(want.free, d.Scenario) {
				continue
			}
			status := want.refused[d.Scenario]
			if schema := want.refused["JSON schema"]; schema != 0 && d.Client == "instructor" && status != http.StatusUnauthorized {
				status = schema // all its requests have a schema or a tool, which the engine reads first
			}
			if (d.Error == nil) != (status == 0) || d.Error != nil && d.Error.Status != status {
				t.Errorf("%s, %s is not as expected (status %d): %s", d.Client, d.Scenario, status, text(d))
			}
			// Programs that shorten a conversation which is too long rely on this class.
			if d.Client == "litellm" && strings.HasSuffix(d.Scenario, "too long") && (d.Error == nil || d.Error.Class != "ContextWindowExceededError") {
				t.Errorf("%s, %s: want ContextWindowExceededError, got %s", d.Client, d.Scenario, text(d))
			}
		}
		for _, r := range routed {
			t.Errorf("%s, %s ran only through the router: %s", r.Client, r.Scenario, text(r))
		}
	}
	var out bytes.Buffer
	w := tabwriter.NewWriter(&out, 0, 0, 2, ' ', 0)
	columns := slices.Sorted(maps.Keys(clients))
	fmt.Fprintf(w, "\t%s\n", strings.Join(columns, "\t"))
	for _, scenario := range slices.Sorted(maps.Keys(scenarios)) {
		line := scenario
		for _, client := range columns {
			line += "\t" + shown[scenario+"\x00"+client]
		}
		fmt.Fprintln(w, line)
	}
	w.Flush()
	return out.String()
}

// same reports whether two cells are equal. The messages for a route that the engine lacks differ: the router names the
// route.
func same(direct, routed cell) bool {
	if direct.Error != nil && routed.Error != nil {
		absent := direct.Error.Status == http.StatusNotFound && direct.Scenario == "embeddings"
		quotes := direct.Error.Class == "InstructorRetryException" // quotes the answers, with their ids and times
		if absent || quotes {
			routed.Error.Message = direct.Error.Message
		}
	}
	return reflect.DeepEqual(direct, routed)
}

func text(c cell) string {
	out, err := json.Marshal(c)
	if err != nil {
		return err.Error()
	}
	return string(out[:min(len(out), 1500)])
}
