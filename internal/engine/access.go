// SPDX-License-Identifier: Apache-2.0

package engine

// The arguments of SGLang and vLLM for TLS and for a key that clients must send, and vLLM's variable for the key.
var (
	tlsFlags    = []string{"--ssl-certfile", "--ssl-keyfile"}
	keyFlag     = "--api-key"
	keyVariable = "VLLM_API_KEY"
)

// checkAccess warns if the engine would refuse the operator's requests: readiness probes, profiles and output probes use
// plain HTTP without a key.
func checkAccess(s Situation, verdict *Support) {
	if _, given := FlagValue(s.UserArgs, tlsFlags...); given {
		verdict.Warn("EngineServesTLS", "spec.engine.args sets %s: readiness probes, routers and profiles reach an engine in plain text only, so its pods never become ready. Remove the flag; spec.routing.tls serves clients by TLS", tlsFlags[0])
	}
	what, given := "spec.engine.args sets "+keyFlag, false
	if s.Sets(keyVariable) {
		what, given = "spec.engine.env sets "+keyVariable, true
	}
	if _, byFlag := FlagValue(s.UserArgs, keyFlag); byFlag || given {
		verdict.Warn("EngineRequiresKey", "%s: profiles and output probes have no key, the engine refuses them, and no plan is made or rolled out. Remove it; spec.routing.auth checks the keys of clients", what)
	}
}
