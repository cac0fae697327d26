// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"maps"
	"testing"
)

func TestParseKeepsVulnerableSymbols(t *testing.T) {
	list, err := parse([]byte(`{"config":{}}
{"finding":{"osv":"GO-1","fixed_version":"v2","trace":[{"module":"m","version":"v1"}]}}
{"finding":{"osv":"GO-1","fixed_version":"v2","trace":[{"module":"m","version":"v1","package":"m/p"}]}}
{"finding":{"osv":"GO-2","fixed_version":"v2","trace":[{"module":"m","version":"v1","package":"m/p","function":"F"}]}}`))
	if err != nil || len(list) != 1 || list[0].OSV != "GO-2" || list[0].Trace[0].Module != "m" {
		t.Errorf("%+v, %v", list, err)
	}
	if _, err := parse([]byte(`{"finding":`)); err == nil {
		t.Error("a part of a message was accepted")
	}
}

func TestModules(t *testing.T) {
	var r report
	err := json.Unmarshal([]byte(`{"id":"GO-1","affected":[
		{"package":{"name":"a"},"ranges":[{"events":[{"introduced":"0"},{"fixed":"1.1"},{"introduced":"2"},{"fixed":"2.3"}]}]},{"package":{"name":"b"},"ranges":[{}]}]}`), &r)
	if got := r.modules(); err != nil || !maps.Equal(got, map[string]string{"a": "2.3", "b": ""}) {
		t.Errorf("%v, %v", got, err)
	}
}
