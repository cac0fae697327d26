// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/semmoe/operator/cmd/internal/clitest"
	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/internal/router"
	"github.com/semmoe/operator/internal/router/plans/planstest"
	"github.com/semmoe/operator/test/load"
	"github.com/semmoe/operator/test/ports"
)

// obedient returns an engine that rejects ranks that it does not have, like SGLang.
func obedient(t *testing.T, ranks int) *httptest.Server {
	t.Helper()
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var rank int
		if text := r.Header.Get("X-Data-Parallel-Rank"); text != "" {
			fmt.Sscan(text, &rank) //nolint:errcheck // 0 is a rank
		}
		if rank >= ranks {
			http.Error(w, fmt.Sprintf(`{"error":{"message":"rank %d is invalid"}}`, rank), http.StatusBadRequest)
			return
		}
		io.WriteString(w, `{"choices":[]}`) //nolint:errcheck // the client notices
	}))
	t.Cleanup(engine.Close)
	return engine
}

// TestRoutesOnABareHost runs the command of the README without Kubernetes: it serves within ten seconds, by the plan in
// a directory, without an artifact store and without a kubeconfig.
func TestRoutesOnABareHost(t *testing.T) {
	p, _ := planstest.Solved(t)
	dir := t.TempDir()
	if err := plan.Write(filepath.Join(dir, "plan"), p.Artifact, []byte("{}")); err != nil {
		t.Fatal(err)
	}
	engine := obedient(t, 4)
	file := filepath.Join(dir, "backends.json")
	content := fmt.Sprintf(`[{"address": %q, "ranks": 4, "engine": "SGLang", "planDir": "plan"}]`, engine.Listener.Addr())
	if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	address := ports.Address(t)
	_, port, _ := strings.Cut(address, ":")
	start := time.Now()
	command := clitest.Start(t, []string{"KUBECONFIG=" + filepath.Join(dir, "none"), "HOME=" + dir},
		"router", "--backends="+file, "--host=127.0.0.1", "--port="+port, "--metrics-port=0")
	var response *http.Response
	command.WaitFor(t, func() bool {
		next, err := http.Post("http://"+address+"/v1/completions", "application/json", strings.NewReader(`{"prompt":[1,2,3]}`))
		if err != nil {
			return false
		}
		next.Body.Close()
		response = next
		return next.Header.Get(router.HeaderPlan) == p.Short()
	})
	if took := time.Since(start); took > load.Scale(10*time.Second) {
		t.Errorf("a request was routed by the plan %v after the start, want at most 10 s", took)
	}
	if response.StatusCode != http.StatusOK || response.Header.Get(router.HeaderPod) != engine.Listener.Addr().String() {
		t.Errorf("status %d, headers %v", response.StatusCode, response.Header)
	}
	if err := command.Terminate(t); err != nil {
		t.Error(err)
	}
}

func TestFlagsOfBareHosts(t *testing.T) {
	for name, tc := range map[string]struct {
		args []string
		want string
	}{
		"pods too":         {[]string{"--backends=http://127.0.0.1:1", "--selector=a=b"}, "--selector applies to pods: it cannot be combined with --backends"},
		"snapshot too":     {[]string{"--backends=http://127.0.0.1:1", "--snapshot-dir=x"}, "--snapshot-dir applies to pods"},
		"neither":          {nil, "--namespace and --selector are required to find the engine pods; without Kubernetes, --backends"},
		"ranks of pods":    {[]string{"--namespace=n", "--selector=a=b", "--ranks=2"}, "--ranks applies to the URLs in --backends"},
		"ranks of a file":  {[]string{"--backends=f.json", "--ranks=2"}, "a file has the fields ranks and planDir"},
		"missing file":     {[]string{"--backends=missing.json", "--port=0", "--metrics-port=0"}, "missing.json: no such file or directory"},
		"unsuitable URL":   {[]string{"--backends=http://127.0.0.1:1/v1"}, `--backends: "http://127.0.0.1:1/v1".address`},
		"engine not known": {[]string{"--backends=http://127.0.0.1:1", "--engine=Ollama"}, "Ollama"},
	} {
		t.Run(name, func(t *testing.T) {
			root := newRootCommand()
			root.SetArgs(append([]string{"router"}, tc.args...))
			root.SetOut(io.Discard)
			if err := root.ExecuteContext(t.Context()); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %v, want %q", err, tc.want)
			}
		})
	}
}
