// The script that engine_page.html loads, as a module.
export default window.log;
