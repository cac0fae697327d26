// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"encoding/json"
	"fmt"
)

// PrefixCaches returns the number of prefix caches of a replica, which each publish KV events.
func (l Launch) PrefixCaches() int32 {
	if l.AttentionDP {
		return l.Ranks
	}
	return 1
}

// KVEventPorts returns the first and the last port of KV events; 0 without KV events. Prefix cache r of n publishes at the
// first port plus r, and replays at the first port plus n plus r (internal/router/kvevents).
func (l Launch) KVEventPorts() (first, last int32) {
	if l.KVEventsPort == 0 {
		return 0, 0
	}
	return l.KVEventsPort, l.KVEventsPort + 2*l.PrefixCaches() - 1
}

// CheckKVEventPorts returns an error that names the field if a port of KV events does not exist or is taken.
func (l Launch) CheckKVEventPorts(taken ...int32) error {
	first, last := l.KVEventPorts()
	const field = "spec.routing.kvEvents.port"
	if last > 65535 {
		return fmt.Errorf("%s: %d is too high: the engine needs %d ports from it on", field, first, last-first+1)
	}
	for _, port := range taken {
		if first > 0 && first <= port && port <= last {
			return fmt.Errorf("%s: the engine needs ports %d to %d, but %d is taken: use another port", field, first, last, port)
		}
	}
	return nil
}

// KVEventsFlag returns the flag for KV events, with further members of its JSON object. Without KV events, users may set
// the flag. Both engines add the data-parallel rank to the ports. They listen on "*" only: with an address, they would
// connect to it.
func KVEventsFlag(launch Launch, more map[string]any) []Flag {
	if launch.KVEventsPort == 0 {
		return nil
	}
	config := map[string]any{
		"publisher": "zmq", "endpoint": fmt.Sprintf("tcp://*:%d", launch.KVEventsPort),
		"replay_endpoint": fmt.Sprintf("tcp://*:%d", launch.KVEventsPort+launch.PrefixCaches()),
	}
	for name, value := range more {
		config[name] = value
	}
	text, err := json.Marshal(config)
	if err != nil {
		panic(err) // strings and booleans always encode
	}
	return []Flag{{Names: []string{"--kv-events-config"}, Value: string(text), Source: "spec.routing.kvEvents"}}
}
