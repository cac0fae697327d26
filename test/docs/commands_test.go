// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/semmoe/operator/solver/trace"
	"github.com/semmoe/operator/solver/trace/tracetest"
	"github.com/semmoe/operator/test/apiserver"
	"github.com/semmoe/operator/test/localcluster"
	"github.com/semmoe/operator/test/markdown"
	"github.com/semmoe/operator/test/programs"
	"github.com/semmoe/operator/test/tier"
)

// reasons contains the permitted reasons in "not run" marks.
var reasons = []string{
	"needs GPUs", "needs running pods", "needs another operator", "needs PyTorch", "takes minutes", "names of your own",
}

// namesOfReaders replaces the placeholders for readers by names that exist in the test.
var namesOfReaders = strings.NewReplacer(
	"<namespace>", "default", "<name>", "shown", "<pod>", "shown", "<job>", "shown", "<short digest>", "6020771edb47c715",
	"/models/Qwen3-30B-A3B", "models/tiny",
)

// fixtures are the objects that the documents assume, in addition to the installed operator.
const fixtures = `
apiVersion: v1
kind: Namespace
metadata: {name: llm}
---
apiVersion: v1
kind: Namespace
metadata: {name: monitoring}
---
apiVersion: v1
kind: Namespace
metadata: {name: argocd}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: argocd-cm, namespace: argocd}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: semmoe-store-ca, namespace: semmoe-system}
data: {ca.crt: certificate}
---
apiVersion: v1
kind: Pod
metadata: {name: shown, namespace: default, labels: {semmoe.io/deployment: shown, semmoe.io/component: engine}}
spec: {containers: [{name: engine, image: "engine:1"}]}
---
apiVersion: coordination.k8s.io/v1
kind: Lease
metadata: {name: manager.semmoe.io, namespace: semmoe-system}
spec: {holderIdentity: a-manager}
`

// objects maps the sample of each kind to the names under which the documents use it.
var objects = map[string][]string{
	"moedeployment.yaml": {"qwen3-30b", "shown"}, "affinityprofile.yaml": {"shown"}, "placementplan.yaml": {"shown"},
}

// untilPods contains the prefixes of commands that need a kubelet.
var untilPods = []string{"kubectl logs "}

// TestCommands checks that every block of commands runs, or has a mark with the reason why it does not.
func TestCommands(t *testing.T) {
	all := documents(t)
	world := newWorld(t)
	ran, used := 0, map[string]bool{}
	for _, file := range slices.Sorted(maps.Keys(all)) {
		directory := ""
		for _, block := range markdown.Blocks(all[file]) {
			if block.Language != "sh" {
				continue
			}
			if why, err := excused(block.Mark); err != nil {
				t.Errorf("%s, line %d: %v", file, block.Line, err)
				continue
			} else if why != "" {
				used[why] = true
				continue
			}
			if directory == "" {
				directory = world.workplace(t)
			}
			ran++
			begin := time.Now()
			output, err := world.run(t.Context(), directory, block.Text)
			if err != nil {
				t.Errorf("%s, line %d: %v\n%s\n%s", file, block.Line, err, block.Text, output)
			}
			t.Logf("%5.1f s: %s, line %d", time.Since(begin).Seconds(), file, block.Line)
		}
	}
	if ran < 25 {
		t.Errorf("only %d blocks were run", ran)
	}
	for _, reason := range reasons {
		if !used[reason] {
			t.Errorf("no block has the reason %q: remove it from reasons", reason)
		}
	}
}

// excused returns the reason why a block with a mark is not run; empty if the block is run.
func excused(mark string) (string, error) {
	if test, ok := strings.CutPrefix(mark, "run by "); ok {
		_, err := os.Stat(filepath.Join(repository, filepath.FromSlash(test)))
		return test, err
	}
	reason, ok := strings.CutPrefix(mark, "not run: ")
	if !ok {
		return "", nil // no mark, or an unrelated comment
	}
	if !slices.Contains(reasons, reason) {
		return "", fmt.Errorf("reason %q is invalid: permitted are %q", reason, reasons)
	}
	return reason, nil
}

// world is the environment of the commands: the project's programs, and an API server without nodes, with the operator
// installed.
type world struct {
	path       string
	kubeconfig string
	repository string
	// made is a directory with the routing traces and plans that most documents about plans need.
	made string
}

func newWorld(t *testing.T) *world {
	t.Helper()
	binaries, err := localcluster.FindBinaries()
	tier.Require(t, err)
	_, err = programs.Built("semmoe")
	tier.Require(t, err)
	root, err := filepath.Abs(repository)
	if err != nil {
		t.Fatal(err)
	}
	server, err := apiserver.Start(&envtest.Environment{CRDDirectoryPaths: []string{filepath.Join(root, "config", "crd")}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := server.Stop(); err != nil {
			t.Error(err)
		}
	})
	w := &world{
		path:       binaries + ":" + filepath.Join(root, "bin") + ":" + os.Getenv("PATH"),
		kubeconfig: filepath.Join(t.TempDir(), "kubeconfig"), repository: root,
	}
	if err := os.WriteFile(w.kubeconfig, server.KubeConfig, 0o600); err != nil {
		t.Fatal(err)
	}
	w.apply(t, "", "-k", filepath.Join(root, "config", "default"))
	w.apply(t, fixtures, "-f", "-")
	for file, names := range objects {
		text, err := os.ReadFile(filepath.Join(root, "config", "samples", file))
		if err != nil {
			t.Fatal(err)
		}
		before, after, _ := strings.Cut(string(text), "  name: ")
		_, after, _ = strings.Cut(after, "\n")
		for _, name := range names {
			w.apply(t, before+"  name: "+name+"\n"+after, "-f", "-")
		}
	}
	w.make(t)
	return w
}

// make creates routing traces with the shape of the checkpoint, and plans from these traces.
func (w *world) make(t *testing.T) {
	t.Helper()
	w.made = t.TempDir()
	shape := tracetest.Shape{Experts: 32, TopK: 4, Layers: 4, Vocabulary: 400, Domains: 4, DocumentsPerDomain: 10, RequestsPerDocument: 5, TokensPerRequest: 40, Noise: 30}
	for seed, name := range []string{"trace", "old", "recent"} {
		routes := tracetest.Generate(shape, uint64(seed))
		routes.Model.Layers, routes.Model.HiddenLayers = []int{0, 1, 2, 3}, 4
		routes.Model.Config = `{"num_hidden_layers":4,"hidden_size":1024}`
		routes.Model.Domains = []string{"english", "french", "german", "go"}
		if err := trace.Create(filepath.Join(w.made, name+".safetensors.zst"), routes); err != nil {
			t.Fatal(err)
		}
	}
	for plan, of := range map[string]string{"plan": "trace", "next": "recent"} {
		solve := "semmoe solve --trace " + of + ".safetensors.zst --ep 8 --attention dp --out " + plan
		if output, err := w.run(t.Context(), w.made, solve); err != nil {
			t.Fatalf("%s: %v\n%s", solve, err, output)
		}
	}
}

func (w *world) apply(t *testing.T, stdin string, args ...string) {
	t.Helper()
	kubectl, err := programs.Kubectl()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := programs.Run(kubectl, []string{"KUBECONFIG=" + w.kubeconfig}, stdin, append([]string{"apply", "--server-side"}, args...)...); err != nil {
		t.Fatal(err)
	}
}

// workplace returns a directory with the files that the documents assume: the repository's config, a checkpoint, and
// routing traces and plans of the checkpoint.
func (w *world) workplace(t *testing.T) string {
	t.Helper()
	directory := t.TempDir()
	for link, to := range map[string]string{
		"config": filepath.Join(w.repository, "config"), "models": filepath.Join(directory, "checkpoints"),
	} {
		if err := os.Symlink(to, filepath.Join(directory, link)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(directory, "checkpoints"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(filepath.Join(w.repository, "internal", "refengine", "testdata", "tiny-qwen3moe"), filepath.Join(directory, "models", "tiny")); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(directory, "dataset.jsonl"), []byte("{\"prompt\": \"a\"}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.CopyFS(directory, os.DirFS(w.made)); err != nil {
		t.Fatal(err)
	}
	return directory
}

// run runs a block in a directory, and returns its output.
func (w *world) run(ctx context.Context, directory, text string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Minute)
	defer cancel()
	var lines []string
	for _, line := range strings.Split(text, "\n") {
		if !slices.ContainsFunc(untilPods, func(prefix string) bool { return strings.HasPrefix(line, prefix) }) {
			lines = append(lines, line)
		}
	}
	command := exec.CommandContext(ctx, "bash", "-euo", "pipefail", "-c", namesOfReaders.Replace(strings.Join(lines, "\n")))
	command.Dir = directory
	command.Env = append(os.Environ(), "PATH="+w.path, "KUBECONFIG="+w.kubeconfig)
	var output bytes.Buffer
	command.Stdout, command.Stderr = &output, &output
	command.WaitDelay = 10 * time.Second
	err := command.Run()
	return output.String(), err
}
