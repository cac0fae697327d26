// SPDX-License-Identifier: Apache-2.0

package refengine

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/go-logr/logr"

	"github.com/semmoe/operator/internal/httpserver"
	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/internal/model/tokenizer"
	"github.com/semmoe/operator/internal/refengine/group"
	"github.com/semmoe/operator/internal/refengine/locality"
	"github.com/semmoe/operator/internal/refengine/model"
	"github.com/semmoe/operator/internal/refengine/server"
	"github.com/semmoe/operator/internal/refengine/shuffle"
)

// The limits allow for the traffic of a request router: the headers of its clients, and one connection per running
// request.
const (
	maxHeaderBytes = 96 << 10
	maxConnections = 2048
)

// Run serves until ctx ends and the running requests are done.
func Run(ctx context.Context, o Options) error {
	if err := o.Validate(); err != nil {
		return err
	}
	listener, err := net.Listen("tcp", net.JoinHostPort(o.Host, strconv.Itoa(o.Port)))
	if err != nil {
		return fmt.Errorf("--host %s --port %d: %w", o.Host, o.Port, err)
	}
	return serve(ctx, listener, o)
}

// answerTimeout limits the time to send the last responses after the last request is computed.
const answerTimeout = time.Second

// serve responds on the listener while the model is loaded, serves, and drains when ctx ends. The drain lasts as long
// as requests run. Without requests the engine stops within answerTimeout.
func serve(ctx context.Context, listener net.Listener, o Options) error {
	return serveModel(ctx, listener, o, load)
}

func serveModel(ctx context.Context, listener net.Listener, o Options, load func(Options) (*server.Engine, error)) error {
	log := logr.FromContextOrDiscard(ctx)
	dialect, err := server.FindDialect(o.Dialect)
	if err != nil {
		return checkpoint.Invalidf("--dialect %v", err)
	}
	var secured *tls.Config
	if o.CertFile != "" && o.NodeRank == 0 {
		certificate, err := tls.LoadX509KeyPair(o.CertFile, o.KeyFile)
		if err != nil {
			return checkpoint.Invalidf("--ssl-certfile and --ssl-keyfile: %v", err)
		}
		secured = &tls.Config{Certificates: []tls.Certificate{certificate}, MinVersion: tls.VersionTLS12}
	}
	front := server.New(dialect, o.APIKeys)
	web := httpserver.New(httpserver.Options{Handler: front, Log: log, MaxHeaderBytes: maxHeaderBytes, MaxConnections: maxConnections, TLS: secured})
	webDone := make(chan error, 1)
	go func() { webDone <- web.Serve(listener) }()
	defer web.Close()
	log.Info("Listening", "address", listener.Addr().String())

	if o.NodeRank > 0 {
		return member(ctx, front, webDone, o)
	}
	started := time.Now()
	var engine *server.Engine
	loaded := make(chan struct{})
	// A read from an unavailable file system does not end with ctx. Its goroutine ends with the process.
	go func() { defer close(loaded); engine, err = load(o) }()
	select {
	case <-loaded:
	case <-ctx.Done():
		log.Info("Stopped while the model was loaded")
		return nil
	}
	if err != nil {
		return err
	}
	lost, leave, err := lead(ctx, o)
	switch {
	case ctx.Err() != nil && err != nil:
		return nil
	case err != nil:
		return err
	}
	defer leave()
	if engine.Tables != nil {
		engine.Tables.Poll(log)
	}
	// The scheduler outlives ctx, so that running requests can finish.
	work, stopWork := context.WithCancel(context.WithoutCancel(ctx))
	var working sync.WaitGroup
	working.Go(func() { engine.Scheduler.Run(work) })
	if engine.Tables != nil {
		working.Go(func() { engine.Tables.Run(work) })
	}
	defer func() { stopWork(); working.Wait() }()
	front.SetEngine(engine)
	log.Info("Ready", "model", o.ModelPath, "architecture", engine.Model.String(), "ranks", o.EPSize,
		"attentionDP", o.EnableDPAttention, "trivialExpertMap", o.InitExpertLocation == locality.Trivial, "fault", o.Fault, "seconds", time.Since(started).Seconds())

	var end error
	select {
	case err := <-webDone:
		return fmt.Errorf("http server: %w", err)
	case end = <-lost:
		if !errors.Is(end, group.ErrLeaving) {
			return end
		}
	case <-engine.Crashed:
		return errors.New("device-side assert triggered: a token id is outside of the vocabulary")
	case <-ctx.Done():
	}
	log.Info("Draining")
	<-front.Drain()
	// The last responses may still be in transmission. A request whose body is still arriving would be rejected.
	last, cancel := context.WithTimeout(work, answerTimeout)
	defer cancel()
	if err := web.Shutdown(last); err != nil && !errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("http server: %w", err)
	}
	log.Info("Stopped")
	if ctx.Err() != nil {
		return nil
	}
	return end // the controller must restart the whole group
}

// lead waits for the other nodes, if there are any.
func lead(ctx context.Context, o Options) (lost <-chan error, leave func(), err error) {
	if o.Nodes == 1 {
		return nil, func() {}, nil
	}
	_, port, err := net.SplitHostPort(o.DistInitAddr)
	if err != nil {
		return nil, nil, checkpoint.Invalidf("--dist-init-addr %q is not host:port: %v", o.DistInitAddr, err)
	}
	listener, err := net.Listen("tcp", net.JoinHostPort(o.Host, port))
	if err != nil {
		return nil, nil, fmt.Errorf("--dist-init-addr %s: %w", o.DistInitAddr, err)
	}
	return group.Lead(ctx, listener, o.Nodes)
}

// member runs a node other than the first. It reports healthy after the group is complete, and stops with the group. To
// stop, it asks the leader to drain and waits for the end of the drain, because requests need all nodes.
func member(ctx context.Context, front *server.Server, webDone <-chan error, o Options) error {
	log := logr.FromContextOrDiscard(ctx)
	wait, leave, err := group.Join(ctx, o.DistInitAddr, o.NodeRank, o.Nodes)
	switch {
	case ctx.Err() != nil && err != nil:
		return nil
	case err != nil:
		return err
	}
	defer context.AfterFunc(ctx, leave)()
	front.SetMember()
	log.Info("Joined", "leader", o.DistInitAddr, "nodeRank", o.NodeRank, "nodes", o.Nodes)
	work, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	ended := make(chan error, 1)
	go func() { ended <- wait(work) }()
	select {
	case err := <-webDone:
		return fmt.Errorf("http server: %w", err)
	case <-ended:
		if ctx.Err() == nil {
			return fmt.Errorf("the connection to node 0 at %s is lost", o.DistInitAddr)
		}
		return nil
	}
}

// load reads the model, its tokenizer and its locality.
func load(o Options) (*server.Engine, error) {
	ckpt, err := checkpoint.OpenAs(o.ModelPath, o.LayoutAs)
	if err != nil {
		return nil, err
	}
	defer ckpt.Close()
	if o.RedundantExperts == 0 {
		if err := ckpt.Config.CheckExpertParallelSize(o.EPSize); err != nil {
			return nil, err
		}
	}
	m, err := model.Load(ckpt, o.ContextLength)
	if err != nil {
		return nil, err
	}
	experts, err := locality.Parse(o.InitExpertLocation, locality.Shape{MoE: m.MoE, Experts: m.Experts, Redundant: o.RedundantExperts, Ranks: o.EPSize})
	if err != nil {
		return nil, checkpoint.Invalidf("--init-expert-location: %v", err)
	}
	var tables *shuffle.Consumer
	if !o.EnableDPAttention && o.EPSize > 1 {
		tables = shuffle.FromEnvironment(o.Getenv, shuffle.Engine{Model: m, Experts: experts, Ranks: o.EPSize, ModelDigest: ckpt.Digest()})
	}
	if o.Fault == FaultIgnoreMapAtDispatch {
		m = m.Misplaced(experts.Slots)
	}
	tokens, err := tokenizer.LoadCheckpoint(o.ModelPath)
	if err != nil {
		return nil, err
	}
	if tokens.VocabSize() > m.Vocab {
		return nil, checkpoint.Invalidf("the tokenizer has %d tokens, config.json's vocab_size is %d: they are of different models", tokens.VocabSize(), m.Vocab)
	}
	ends, err := endTokens(ckpt)
	if err != nil {
		return nil, err
	}
	dialect, err := server.FindDialect(o.Dialect)
	if err != nil {
		return nil, checkpoint.Invalidf("--dialect %v", err)
	}
	ignoresRank, _ := strings.CutPrefix(o.Fault, FaultIgnoreRank)
	return server.NewEngine(server.Config{
		Model: m, Tokenizer: tokens, EndTokens: ends, ServedName: o.servedName(), ExpertRanks: o.EPSize, AttentionDP: o.EnableDPAttention,
		ExpertMap: experts, Tables: tables, Dialect: dialect, Metrics: o.EnableMetrics, ReturnRoutes: o.EnableReturnRoutedExperts, IgnoresRank: ignoresRank, StepDelay: o.stepDelay(), ContextLength: m.MaxPositions, MaxRunning: o.MaxRunning,
		MaxQueued: o.MaxQueued, ChunkedPrefillSize: o.ChunkedPrefillSize, Workers: o.Threads,
	}), nil
}

// endTokens reads eos_token_id, a number or a list, from generation_config.json or else from config.json.
func endTokens(ckpt *checkpoint.Checkpoint) ([]int32, error) {
	var generation, config struct {
		EOS json.RawMessage `json:"eos_token_id"`
	}
	if _, err := ckpt.ReadJSON("generation_config.json", &generation); err != nil {
		return nil, err
	}
	if err := json.Unmarshal(ckpt.Config.Text, &config); err != nil {
		return nil, checkpoint.Invalidf("config.json: %v", err)
	}
	for _, raw := range []json.RawMessage{generation.EOS, config.EOS} {
		if len(raw) == 0 || string(raw) == "null" {
			continue
		}
		var one int32
		if json.Unmarshal(raw, &one) == nil {
			return []int32{one}, nil
		}
		var many []int32
		if err := json.Unmarshal(raw, &many); err != nil {
			return nil, checkpoint.Invalidf("eos_token_id %s is neither a token id nor a list of them", raw)
		}
		return many, nil
	}
	return nil, nil
}
