package client

import (
	"context"
	"testing"
)

func TestRunning(t *testing.T) {
	var running Running
	end := running.Begin()
	ctx, cancel := context.WithCancel(t.Context())
	idle := make(chan bool, 1)
	go func() { idle <- running.Idle(ctx) }()
	cancel()
	if <-idle {
		t.Error("idle while a request runs")
	}
	end()
	if !running.Idle(t.Context()) {
		t.Error("not idle after the last request")
	}
}
