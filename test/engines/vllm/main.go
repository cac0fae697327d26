// Command vllm is a double of vLLM 0.22.0 for tests of the operator: the reference engine behind vLLM's command line, as strict about the
// flags of several nodes as vllm/engine/arg_utils.py is, and behind the routes that the operator and the request router use. A worker has
// no server, as with --headless.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/semmoe/operator/internal/refengine"
	"github.com/semmoe/operator/internal/router/wire"
)

// release is what the double reports, and is as old as the oldest release that returns routed experts.
const release = "0.22.0"

// rpcPort is the default of --data-parallel-rpc-port.
const rpcPort = 29550

// routes are those that are passed on. vLLM has no /generate and no /v1/tokenize.
var routes = []string{
	"/health", "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses", "/tokenize", "/v1/models", "/metrics",
}

// maxBodyBytes bounds a request.
const maxBodyBytes = 16 << 20

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "vllm:", err)
		os.Exit(1)
	}
}

// node is what the command line asks for.
type node struct {
	model, name, host, masterAddress, strategy string
	port, tensorParallel, dataParallel         int
	nodes, rank                                int
	expertParallel, headless, routedExperts    bool
}

func parse(args []string) (node, error) {
	var n node
	if len(args) < 2 || args[0] != "serve" {
		return n, errors.New("usage: vllm serve MODEL [flags]")
	}
	n.model = args[1]
	flags := flag.NewFlagSet("vllm serve", flag.ContinueOnError)
	flags.StringVar(&n.name, "served-model-name", n.model, "")
	flags.StringVar(&n.host, "host", "0.0.0.0", "")
	flags.IntVar(&n.port, "port", 8000, "")
	flags.IntVar(&n.tensorParallel, "tensor-parallel-size", 1, "")
	flags.IntVar(&n.dataParallel, "data-parallel-size", 1, "")
	flags.BoolVar(&n.expertParallel, "enable-expert-parallel", false, "")
	flags.BoolVar(&n.routedExperts, "enable-return-routed-experts", false, "")
	flags.StringVar(&n.strategy, "expert-placement-strategy", "linear", "")
	flags.IntVar(&n.nodes, "nnodes", 1, "")
	flags.IntVar(&n.rank, "node-rank", 0, "")
	flags.StringVar(&n.masterAddress, "master-addr", "127.0.0.1", "")
	flags.BoolVar(&n.headless, "headless", false, "")
	flags.String("all2all-backend", "allgather_reducescatter", "")
	if err := flags.Parse(args[2:]); err != nil {
		return n, err
	}
	switch {
	case flags.NArg() > 0:
		return n, fmt.Errorf("unrecognized arguments: %v", flags.Args())
	case n.nodes < 1 || n.dataParallel*n.tensorParallel%n.nodes != 0:
		return n, fmt.Errorf("--nnodes %d must evenly divide the total world size (%d)", n.nodes, n.dataParallel*n.tensorParallel)
	case n.rank < 0 || n.rank >= n.nodes:
		return n, fmt.Errorf("--node-rank must be between 0 and %d; got %d", n.nodes-1, n.rank)
	case n.headless != (n.rank > 0):
		return n, fmt.Errorf("--headless is %t on node %d: the first node serves, and only that", n.headless, n.rank)
	case !n.expertParallel || n.tensorParallel != 1 || n.strategy != "linear":
		return n, errors.New("this double has expert parallelism with data-parallel attention and experts placed linearly")
	}
	return n, nil
}

func run(ctx context.Context, args []string) error {
	n, err := parse(args)
	if err != nil {
		return err
	}
	inner, err := freePort(n.host) // pods may have no loopback
	if err != nil {
		return err
	}
	o := refengine.DefaultOptions()
	o.ModelPath, o.ServedModelName, o.Host, o.Port = n.model, n.name, n.host, inner
	o.TPSize, o.DPSize, o.EPSize, o.EnableDPAttention = n.dataParallel, n.dataParallel, n.dataParallel, true
	o.Nodes, o.NodeRank, o.Threads = n.nodes, n.rank, 1
	if n.nodes > 1 {
		o.DistInitAddr = net.JoinHostPort(n.masterAddress, strconv.Itoa(rpcPort))
	}
	first := n.rank * (n.dataParallel / n.nodes)
	fmt.Printf("Inferred data_parallel_rank %d from node_rank %d\n", first, n.rank)
	if n.headless {
		return refengine.Run(ctx, o)
	}
	listener, err := net.Listen("tcp", net.JoinHostPort(n.host, strconv.Itoa(n.port)))
	if err != nil {
		return err
	}
	web := &http.Server{Handler: surface(net.JoinHostPort(n.host, strconv.Itoa(inner)))}
	go func() { _ = web.Serve(listener) }()
	defer web.Close()
	return refengine.Run(ctx, o)
}

// surface is vLLM's in front of the reference engine.
func surface(inner string) http.Handler {
	pass := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: inner})
	pass.ModifyResponse = nameErrors
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Path == "/version":
			_, _ = fmt.Fprintf(w, `{"version":%q}`, release)
		case slices.Contains(routes, r.URL.Path) || strings.HasPrefix(r.URL.Path, "/v1/responses/"):
			if err := deafen(r); err != nil {
				http.Error(w, err.Error(), http.StatusBadRequest)
				return
			}
			pass.ServeHTTP(w, r)
		default: // as vllm/entrypoints/serve/exception_handling/handlers/http.py
			writeJSON(w, http.StatusNotFound, map[string]any{"error": map[string]any{"message": "Not Found", "type": "Not Found", "param": nil, "code": http.StatusNotFound}})
		}
	})
}

// rankHeader is what chat completions, completions and messages read, if it is a number (_get_data_parallel_rank in
// vllm/entrypoints/openai).
const rankHeader = "X-Data-Parallel-Rank"

// deafen takes out of a request what vLLM does not read: a rank in the body, and one that is no number.
func deafen(r *http.Request) error {
	if _, err := strconv.Atoi(r.Header.Get(rankHeader)); err != nil {
		r.Header.Del(rankHeader)
	}
	body, err := io.ReadAll(io.LimitReader(r.Body, maxBodyBytes))
	if err != nil {
		return err
	}
	wire.DropRank(body)
	r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
	return nil
}

// nameErrors gives errors of the Messages API the types of vLLM's errors of chat completions (translate_error_response in
// vllm/entrypoints/anthropic/api_router.py).
func nameErrors(response *http.Response) error {
	name := map[int]string{http.StatusBadRequest: "BadRequestError", http.StatusNotFound: "NotFoundError"}[response.StatusCode]
	if name == "" || !strings.HasPrefix(response.Request.URL.Path, "/v1/messages") {
		return nil
	}
	defer response.Body.Close()
	var body struct {
		Type  string            `json:"type"`
		Error map[string]string `json:"error"`
	}
	if err := json.NewDecoder(response.Body).Decode(&body); err != nil {
		return err
	}
	body.Error["type"] = name
	text, err := json.Marshal(body)
	response.Body, response.ContentLength = io.NopCloser(bytes.NewReader(text)), int64(len(text))
	response.Header.Set("Content-Length", strconv.Itoa(len(text)))
	return err
}

func writeJSON(w http.ResponseWriter, status int, value any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(value) // a client that has left needs no answer
}

func freePort(host string) (int, error) {
	listener, err := net.Listen("tcp", net.JoinHostPort(host, "0"))
	if err != nil {
		return 0, err
	}
	defer listener.Close()
	return listener.Addr().(*net.TCPAddr).Port, nil
}
