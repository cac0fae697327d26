// SPDX-License-Identifier: Apache-2.0

package vllm

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/go-logr/logr/testr"

	"github.com/semmoe/operator/internal/model/tokenizer"
	"github.com/semmoe/operator/internal/router/kvevents"
	"github.com/semmoe/operator/test/poll"
	"github.com/semmoe/operator/test/ports"
)

// runningEngine and the other flags name an engine that runs already, instead of one that the test starts: a vLLM that was
// started as startWithEvents does, or SGLang (test/gpu/serve_sglang.sh 30000 --page-size 32 --max-total-tokens 1536
// --enable-cache-report --kv-events-config ...) with -rank-member routed_dp_rank.
var (
	runningEngine = flag.String("engine", "", "URL of a running engine for TestKVEvents; default: the test starts vLLM")
	runningEvents = flag.Int("events-port", 0, "port of rank 0 for the KV events of -engine")
	rankMember    = flag.String("rank-member", "", "member of requests that names the rank; default: the header of vLLM only")
)

const (
	eventRanks  = 2
	eventBlock  = 32   // tokens; the CPU backend accepts multiples of 32 only
	eventBlocks = 48   // of a rank: few, so that it evicts
	vocabulary  = 1000 // below that of the small model
)

// TestKVEvents checks that the cached tokens that KV events predict for a prompt on a rank are those that the engine
// then reports: for prompts of token IDs and of text, with evictions.
func TestKVEvents(t *testing.T) {
	url, port := *runningEngine, *runningEvents
	if url == "" {
		url, port = startWithEvents(t)
	}
	tokens, err := tokenizer.Load("../../internal/refengine/testdata/tiny-qwen3moe/tokenizer.json")
	if err != nil {
		t.Fatal(err)
	}
	events := kvevents.New(port, testr.New(t))
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		events.Run(ctx)
	}()
	defer func() { cancel(); <-ended }()
	var targets []kvevents.Target
	for rank := range eventRanks {
		targets = append(targets, kvevents.Target{Place: kvevents.Place{Address: url, Rank: rank}, Host: "127.0.0.1", Ranks: eventRanks})
	}
	events.Set(targets)
	promptOf := func(ids []int32) kvevents.Prompt {
		return kvevents.Prompt{Tokens: func(int) []int32 { return ids }, MayPrecede: tokens.IsSpecial}
	}
	poll.Until(t, "both subscriptions are live", func() bool { return len(events.Cached(promptOf([]int32{1}))) == eventRanks })

	random := rand.New(rand.NewPCG(1, 2))
	var seen [][]int32
	var hits, cachedTokens, evicted int
	const requests = 200
	for i := range requests {
		rank := random.IntN(eventRanks)
		place := kvevents.Place{Address: url, Rank: rank}
		ids, prompt := nextPrompt(random, seen, tokens)
		predicted := events.Cached(promptOf(ids))[place]
		reported := complete(t, url, rank, prompt)
		if predicted != reported {
			t.Errorf("request %d of %d tokens on rank %d: events predict %d cached tokens, the engine reports %d", i, len(ids), rank, predicted, reported)
		}
		if reported > 0 {
			hits++
			cachedTokens += reported
		} else if i > requests/2 {
			evicted++
		}
		// The events of a request follow its response. They have arrived once all its blocks are known.
		poll.Until(t, "the blocks of the request are known", func() bool {
			return events.Cached(promptOf(append(ids[:len(ids):len(ids)], 0)))[place] == len(ids)/eventBlock*eventBlock
		})
		seen = append(seen, ids)
	}
	t.Logf("%d requests, %d with cached tokens (%d in total), %d of the second half without", requests, hits, cachedTokens, evicted)
	if hits < requests/10 || evicted == 0 {
		t.Error("the requests do not test hits and evictions")
	}
}

// nextPrompt returns the token IDs of a prompt, and the prompt as JSON: IDs or text. It often begins like an earlier one.
func nextPrompt(random *rand.Rand, seen [][]int32, tokens *tokenizer.Tokenizer) (ids []int32, prompt any) {
	length := 40 + random.IntN(300)
	if random.IntN(3) == 0 {
		var words []string
		random := rand.New(rand.NewPCG(uint64(random.IntN(4)), 3)) // of four texts, different lengths
		for range length {
			words = append(words, []string{"func", "return", "if", "err", "nil", "the", "of", "name"}[random.IntN(8)])
		}
		text := strings.Join(words, " ")
		return tokens.Encode(text), text
	}
	if len(seen) > 0 && random.IntN(2) == 0 {
		earlier := seen[max(0, len(seen)-20)+random.IntN(min(len(seen), 20))]
		ids = append(ids, earlier[:random.IntN(len(earlier))]...)
	}
	for len(ids) < length {
		ids = append(ids, int32(random.IntN(vocabulary)))
	}
	return ids, ids
}

// complete sends a completion to a rank, and returns the number of cached tokens of the prompt that the engine reports.
func complete(t *testing.T, url string, rank int, prompt any) int {
	t.Helper()
	members := map[string]any{"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0}
	if *rankMember != "" {
		members[*rankMember] = rank
	}
	body, err := json.Marshal(members)
	if err != nil {
		t.Fatal(err)
	}
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url+"/v1/completions", bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("X-data-parallel-rank", strconv.Itoa(rank))
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	var answer struct {
		Usage struct {
			Details *struct {
				Cached int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		}
	}
	if err != nil || response.StatusCode != http.StatusOK || json.Unmarshal(text, &answer) != nil {
		t.Fatalf("%s: %.300s, error %v", response.Status, text, err)
	}
	if answer.Usage.Details == nil {
		return 0
	}
	return answer.Usage.Details.Cached
}

// startWithEvents starts vLLM with KV events, waits until it serves, and returns its URL and the port of the events.
func startWithEvents(t *testing.T) (url string, port int) {
	t.Helper()
	if *environment == "" {
		t.Skip("-args -vllm names no environment: make e2e-clients")
	}
	serving := ports.Reserve(t)
	port = freePorts(t, 2*eventRanks)
	log, err := os.Create(filepath.Join(t.TempDir(), "vllm.log"))
	if err != nil {
		t.Fatal(err)
	}
	config := fmt.Sprintf(`{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:%d","replay_endpoint":"tcp://*:%d"}`, port, port+eventRanks)
	server := exec.Command("./serve.sh", strconv.Itoa(serving), "--api-server-count=1", "--block-size", strconv.Itoa(eventBlock),
		"--num-gpu-blocks-override", strconv.Itoa(eventBlocks), "--enable-prompt-tokens-details", "--kv-events-config", config)
	server.Env = append(os.Environ(), "SEMMOE_VLLM_DIR="+*environment, "RANKS="+strconv.Itoa(eventRanks))
	server.Stdout, server.Stderr = log, log
	server.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // each rank is a separate process
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- server.Wait() }()
	t.Cleanup(func() {
		_ = syscall.Kill(-server.Process.Pid, syscall.SIGKILL)
		<-ended
		if text, err := os.ReadFile(log.Name()); err == nil && t.Failed() {
			t.Logf("%s", text[max(0, len(text)-4000):])
		}
	})
	url = fmt.Sprintf("http://127.0.0.1:%d", serving)
	client := http.Client{Timeout: 5 * time.Second}
	poll.Until(t, "vLLM serves", func() bool {
		select {
		case err := <-ended:
			ended <- err
			t.Fatalf("vLLM has ended: %v", err)
		default:
		}
		response, err := client.Get(url + "/health")
		if err != nil {
			return false
		}
		response.Body.Close()
		return response.StatusCode == http.StatusOK
	})
	return url, port
}

// freePorts returns the first of n consecutive free ports.
func freePorts(t *testing.T, n int) int {
	t.Helper()
next:
	for range 100 {
		first := 20_000 + rand.IntN(10_000)
		for port := first; port < first+n; port++ {
			l, err := net.Listen("tcp", net.JoinHostPort("", strconv.Itoa(port)))
			if err != nil {
				continue next
			}
			l.Close()
		}
		return first
	}
	t.Fatalf("no %d consecutive ports are free", n)
	return 0
}
